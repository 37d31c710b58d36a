// libFuzzer: layouts of blocks and the bytes of messages.
#include "exercise_messages.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  tf_basis::exercise::Source source(data, size);
  tf_basis::exercise::ExerciseMessages(&source, tf_basis::exercise::Serial());
  return 0;
}
