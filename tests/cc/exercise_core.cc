// Random problems through all of core/, each with several numbers of threads,
// which must give the same bits. Built with sanitizers by `make sanitize`.
//
//   exercise_core PROBLEMS FIRST_SEED
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "exercise_mapping.h"
#include "exercise_messages.h"
#include "exercise_table.h"

namespace {

using tf_basis::ParallelFor;
using tf_basis::exercise::Source;

// Where a check or a sanitizer stops the program, this says by what.
uint64_t current_seed;

void SaySeed(int) {
  std::fprintf(stderr, "in the problem with seed %llu\n",
               static_cast<unsigned long long>(current_seed));
  std::_Exit(1);
}

template <typename Work>
void SameBits(const char* name, uint64_t seed, const Work& work) {
  const auto with = [&](const ParallelFor& parallel_for) {
    Source source(reinterpret_cast<const uint8_t*>(&seed), sizeof(seed));
    return work(&source, parallel_for);
  };
  const uint64_t wanted = with(tf_basis::exercise::Serial());
  for (const int64_t threads : {2, 5}) {
    if (with(tf_basis::exercise::Threads(threads)) == wanted) continue;
    std::fprintf(stderr, "%s: %d threads give other bits with seed %llu\n",
                 name, static_cast<int>(threads),
                 static_cast<unsigned long long>(seed));
    std::exit(1);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const uint64_t first = std::strtoull(argv[2], nullptr, 10);
  const uint64_t end = first + std::strtoull(argv[1], nullptr, 10);
  std::signal(SIGABRT, SaySeed);
  for (uint64_t seed = first; seed < end; ++seed) {
    current_seed = seed;
    Source source(reinterpret_cast<const uint8_t*>(&seed), sizeof(seed));
    tf_basis::exercise::ExerciseMapping(&source);
    SameBits("table", seed, tf_basis::exercise::ExerciseTable);
    SameBits("messages", seed, tf_basis::exercise::ExerciseMessages);
  }
  std::printf("%llu problems\n", static_cast<unsigned long long>(end - first));
  return 0;
}
