// Moves the counters and moments of one bucket.
#ifndef TF_BASIS_CORE_BUCKET_MOMENTS_H_
#define TF_BASIS_CORE_BUCKET_MOMENTS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/bucket_access.h"

namespace tf_basis {

class BucketMoments : protected BucketAccess {
 public:
  // Moves the counters and moments of a bucket: the first moment by
  // `first_count` gradients, the second by `count`.
  void UpdateBucket(int64_t b, const float* const* first_g, int64_t first_count,
                    const float* const* g, int64_t count) {
    int32_t& steps = state_.bucket_steps[b];
    float* m =
        HasFirstMoment(b) ? state_.first_moment.Open(b, Scratch(0)) : nullptr;
    float* v = state_.second_moment ? state_.second_moment.Open(b, Scratch(1))
                                    : nullptr;
    const int64_t missed = Missed(b);
    if (state_.last_step != nullptr) {
      if (m != nullptr && missed > 0) {
        Scale(m, IntegerPower(rule_.first_keep, missed), dim_);
      }
      if (v != nullptr && missed > 0) {
        Scale(v, IntegerPower(rule_.second_keep, missed), dim_);
      }
      steps = SaturatingAdd(steps, missed);
      state_.last_step[b] = static_cast<int32_t>(
          std::min<int64_t>(rule_.step, std::numeric_limits<int32_t>::max()));
    }
    const bool sequential = rule_.reduce == CollisionReduce::kSequential;
    steps =
        SaturatingAdd(steps, sequential ? count : std::min<int64_t>(count, 1));
    if (sequential) {
      if (m != nullptr) {
        TakeInOrder(m, rule_.first_keep, rule_.first_take, first_g, first_count,
                    /*square=*/false);
      }
      if (v != nullptr) {
        TakeInOrder(v, rule_.second_keep, rule_.second_take, g, count,
                    /*square=*/true);
      }
    } else {
      if (m != nullptr && first_count > 0) {
        Take(m, rule_.first_keep, rule_.first_take,
             first_count == 1 ? first_g[0]
                              : Reduce(first_g, first_count, /*square=*/false),
             dim_);
      }
      if (v != nullptr && count == 1) {
        TakeSquare(v, rule_.second_keep, rule_.second_take, g[0], dim_);
      } else if (v != nullptr && count > 1) {
        Take(v, rule_.second_keep, rule_.second_take,
             Reduce(g, count, /*square=*/true), dim_);
      }
    }
    if (m != nullptr) {
      state_.first_moment.Close(b, m, Key(kFirstMomentSlot, b, FirstSteps(b)));
    }
    if (v != nullptr) {
      Saturate(v, dim_);
      state_.second_moment.Close(b, v, Key(kSecondMomentSlot, b, steps));
    }
  }

 protected:
  BucketMoments(const BucketRule& rule, const TableState& state,
                int64_t scratch_rows)
      : BucketAccess(rule, state, scratch_rows), sum_(dim_), reduced_(dim_) {}

  std::vector<double> sum_;  // scratch: of one bucket or row

 private:
  // moment <- keep * moment + take * x once for each row, as one sum.
  void TakeInOrder(float* moment, double keep, double take,
                   const float* const* g, int64_t count, bool square) {
    double* sum = sum_.data();
    std::fill_n(sum, dim_, 0.0);
    for (int64_t k = 0; k < count; ++k) {
      const double weight = take * IntegerPower(keep, count - 1 - k);
      for (int64_t j = 0; j < dim_; ++j) {
        const double x = g[k][j];
        sum[j] += weight * (square ? Saturated(x * x) : x);
      }
    }
    const double kept = IntegerPower(keep, count);
    for (int64_t j = 0; j < dim_; ++j) {
      const double moved = moment[j] * kept + sum[j];
      moment[j] = static_cast<float>(square ? Saturated(moved) : moved);
    }
  }

  // The mean or sum over the rows of a bucket of g or g^2.
  const float* Reduce(const float* const* g, int64_t count, bool square) {
    double* sum = sum_.data();
    std::fill_n(sum, dim_, 0.0);
    for (int64_t k = 0; k < count; ++k) {
      const float* x = g[k];
      if (square) {
        for (int64_t j = 0; j < dim_; ++j) {
          sum[j] += Saturated(static_cast<double>(x[j]) * x[j]);
        }
      } else {
        for (int64_t j = 0; j < dim_; ++j) sum[j] += x[j];
      }
    }
    const double divisor = rule_.reduce == CollisionReduce::kMean
                               ? static_cast<double>(count)
                               : 1.0;
    float* out = reduced_.data();
    for (int64_t j = 0; j < dim_; ++j) {
      const double reduced = sum[j] / divisor;
      out[j] = static_cast<float>(square ? Saturated(reduced) : reduced);
    }
    return out;
  }

  std::vector<float> reduced_;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BUCKET_MOMENTS_H_
