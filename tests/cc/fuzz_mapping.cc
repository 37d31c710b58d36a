// libFuzzer: sizes, domains, owners and row ids.
#include "exercise_mapping.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tf_basis::exercise::Source source(data, size);
  tf_basis::exercise::ExerciseMapping(&source);
  return 0;
}
