// The step of OneBitAdam after its warm-up: a message becomes the new momentum,
// and the momentum, over the root of the frozen variance, moves the variables.
#ifndef TF_BASIS_CORE_FROZEN_STEP_H_
#define TF_BASIS_CORE_FROZEN_STEP_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/block_quantize.h"
#include "core/wide.h"

namespace tf_basis {

// The scalars of a step: a variable moves by
// m * first_scale / (sqrt(v) * root_scale + epsilon).
struct FrozenStep {
  float first_scale, root_scale, epsilon, decay;
};

// A variable: `count` elements of the flat buffer from `start` on.
struct Target {
  int64_t start, count;
  float* values;
  bool decays;
};

// Elements that had no gradient in the warm-up have no variance, and rest.
inline void Move(const FrozenStep& step, const float* __restrict__ first,
                 const float* __restrict__ second, bool decays,
                 float* __restrict__ values, int64_t count) {
  const float decay = decays ? step.decay : 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const float root = std::sqrt(second[i]) * step.root_scale;
    const float change = first[i] * step.first_scale / (root + step.epsilon);
    // Masked, for a choice would keep the compiler from taking several at once.
    uint32_t bits;
    std::memcpy(&bits, &change, sizeof(bits));
    bits &= second[i] > 0 ? ~uint32_t{0} : 0;
    float move;
    std::memcpy(&move, &bits, sizeof(move));
    values[i] = values[i] - values[i] * decay - move;
  }
}

// `targets` lie one after the other, perhaps with gaps: there only the momentum
// changes.
template <int kBits>
TF_BASIS_WIDE void StepBlocks(const BlockLayout& layout, const FrozenStep& step,
                              const uint8_t* message, float* first,
                              const float* second,
                              const std::vector<Target>& targets, int64_t begin,
                              int64_t end) {
  size_t next = 0;
  const int64_t from = begin * layout.block;
  while (next < targets.size() &&
         targets[next].start + targets[next].count <= from) {
    ++next;
  }
  for (int64_t b = begin; b < end; ++b) {
    const int64_t start = b * layout.block, stop = start + layout.length(b);
    DecodeBlock<kBits>(layout, message + b * layout.stride(), stop - start,
                       first + start);
    while (next < targets.size() && targets[next].start < stop) {
      const Target& target = targets[next];
      const int64_t ends = target.start + target.count;
      const int64_t i = std::max(start, target.start);
      const int64_t until = std::min(stop, ends);
      Move(step, first + i, second + i, target.decays,
           target.values + (i - target.start), until - i);
      if (ends > stop) break;  // it goes on in the next block
      ++next;
    }
  }
}

// A step that this rank takes alone: momentum <- keep * momentum + take *
// values, drift <- drift + momentum * first_scale, and the variables move.
struct LocalStep {
  FrozenStep move;
  float keep, take;
};

TF_BASIS_WIDE inline void StepAlone(const BlockLayout& layout,
                                    const LocalStep& step, const Pieces& values,
                                    float* first, const float* second,
                                    float* drift,
                                    const std::vector<Target>& targets,
                                    int64_t begin, int64_t end) {
  std::vector<float> scratch;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t start = b * layout.block, count = layout.length(b);
    const float* __restrict__ taken = values.Get(start, count, &scratch);
    float* __restrict__ m = first + start;
    float* __restrict__ u = drift + start;
    for (int64_t i = 0; i < count; ++i) {
      m[i] = step.keep * m[i] + step.take * taken[i];
      u[i] += m[i] * step.move.first_scale;
    }
  }
  const int64_t from = begin * layout.block;
  const int64_t stop = std::min(end * layout.block, layout.elements);
  for (const Target& target : targets) {
    const int64_t i = std::max(from, target.start);
    const int64_t until = std::min(stop, target.start + target.count);
    if (i >= until) continue;
    Move(step.move, first + i, second + i, target.decays,
         target.values + (i - target.start), until - i);
  }
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_FROZEN_STEP_H_
