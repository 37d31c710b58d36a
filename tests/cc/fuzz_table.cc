// libFuzzer: row ids, gradients and state of any bits in a step on a table.
#include "exercise_table.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tf_basis::exercise::Source source(data, size);
  tf_basis::exercise::ExerciseTable(&source, tf_basis::exercise::Serial());
  return 0;
}
