// What every part of a step knows of a table: the rule, the variables, and
// where a bucket's moments are.
#ifndef TF_BASIS_CORE_BUCKET_ACCESS_H_
#define TF_BASIS_CORE_BUCKET_ACCESS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/bucket_rule.h"
#include "core/columns.h"

namespace tf_basis {

// Tells apart the variables of a table in the keys of stochastic rounding.
enum RoundingSlot : uint32_t {
  kTableSlot = 0,
  kFirstMomentSlot = 1,
  kSecondMomentSlot = 2,
  kRowScalarSlot = 3,
};

inline int32_t SaturatingAdd(int32_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(std::min<int64_t>(a + b, kMost));
}

// One per thread, since it owns `scratch_rows` rows of scratch memory.
class BucketAccess {
 protected:
  BucketAccess(const BucketRule& rule, const TableState& state,
               int64_t scratch_rows)
      : rule_(rule),
        state_(state),
        dim_(state.dim),
        scratch_(scratch_rows * state.dim) {}

  float* Scratch(int i) { return scratch_.data() + i * dim_; }

  bool HasFirstMoment(int64_t bucket) const {
    return bucket < state_.first_moment_rows;
  }

  // How many steps the first moment of a bucket has seen.
  int32_t FirstSteps(int64_t bucket) const {
    return state_.leader != nullptr ? state_.leader_steps[bucket]
                                    : state_.bucket_steps[bucket];
  }

  // Steps of the optimizer that a bucket with stale decay was not touched in.
  int64_t Missed(int64_t bucket) const {
    if (state_.last_step == nullptr || state_.bucket_steps[bucket] == 0)
      return 0;
    // Within bounds, or a step out of all reason would overflow here.
    const int64_t step = std::clamp<int64_t>(rule_.step, 0, int64_t{1} << 62);
    return std::max<int64_t>(step - state_.last_step[bucket] - 1, 0);
  }

  RoundingKey Key(uint32_t slot, int64_t row, int64_t step) const {
    return RoundingKey(rule_.seed, slot, row, step);
  }

  double Correction(double keep, int64_t steps) const {
    return rule_.bias_correction ? 1.0 / (1.0 - IntegerPower(keep, steps))
                                 : 1.0;
  }

  double ClipScalar(double s) const {
    return std::min(std::max(s, rule_.scalar_min), rule_.scalar_max);
  }

  const BucketRule& rule_;
  const TableState& state_;
  const int64_t dim_;

 private:
  std::vector<float> scratch_;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BUCKET_ACCESS_H_
