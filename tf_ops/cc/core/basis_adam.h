// One BasisAdam step on the touched buckets of one table, in place.
// The rule is written down in docs/basis_adam.md; tf_basis/rules/adam.py is the
// pure-TensorFlow twin and tests/reference/basis_adam.py the float64 reference.
#ifndef TF_BASIS_CORE_BASIS_ADAM_H_
#define TF_BASIS_CORE_BASIS_ADAM_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/parallel.h"
#include "core/row_groups.h"

namespace tf_basis {

enum class RowScalar { kEnergy, kLearned, kNone };
enum class ScalarRule { kGradient, kSign, kLog };
enum class CollisionReduce { kMean, kSum, kSequential };

struct BasisAdamRule {
  RowScalar scalar;
  ScalarRule scalar_rule;
  CollisionReduce reduce;
  bool bias_correction;
  double learning_rate;
  double beta_1;
  double beta_2;
  double epsilon;
  double weight_decay;   // 0: off
  double row_clipnorm;   // 0: off
  double scalar_decay;
  double scalar_min;
  double scalar_max;
  double scalar_learning_rate;
};

// Raw views of the variables of one table; rows are `dim` floats apart.
struct BasisAdamState {
  int64_t dim;
  float* table;            // [n_rows, dim]
  float* first_moment;     // [first_moment_rows, dim]
  int64_t first_moment_rows;  // buckets below this have a first moment
  float* second_moment;    // [num_buckets, dim]
  int32_t* bucket_steps;   // [num_buckets]
  float* row_scalar;       // [n_rows]: energies, learned scalars, or null
  int64_t owners;          // buckets below this belong to one row each
};

// base ** exponent by squaring: exact for 1, and far cheaper than std::pow.
inline double IntegerPower(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// 1 / (1 - beta^steps), the factor that removes the bias of a moment.
inline double BiasCorrection(double beta, int64_t steps) {
  return 1.0 / (1.0 - IntegerPower(beta, steps));
}

inline void PrefetchFloats(const float* data, int64_t count) {
  constexpr int64_t kFloatsPerLine = 16;
  constexpr int64_t kMostLines = 8;  // the hardware follows longer rows itself
  const int64_t end = std::min(count, kMostLines * kFloatsPerLine);
  for (int64_t i = 0; i < end; i += kFloatsPerLine) {
    __builtin_prefetch(data + i, 1);
  }
}

// The sum of term(j) over [0, count) in float64. The lanes are added in one fixed
// order, so that the compiler can use wide registers and the bits stay the same.
template <typename Term>
double LaneSum(int64_t count, const Term& term) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += term(j + lane);
  }
  for (; j < count; ++j) lanes[j % kLanes] += term(j);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) +
         ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

inline double SquaredNorm(const float* x, int64_t count) {
  return LaneSum(count,
                 [x](int64_t j) { return static_cast<double>(x[j]) * x[j]; });
}

// Works on one bucket at a time; one per thread, since it owns scratch memory.
class BasisAdamBucket {
 public:
  BasisAdamBucket(const BasisAdamRule& rule, const BasisAdamState& state,
                  const RowGroups& groups, const float* values)
      : rule_(rule),
        state_(state),
        groups_(groups),
        values_(values),
        learning_rate_(rule.learning_rate),
        sum_(state.dim),
        mean_(state.dim),
        denominator_(state.dim),
        preview_(state.dim) {}

  // Asks for the memory of a bucket that will be updated soon.
  void Prefetch(int64_t i) const {
    const int64_t begin = groups_.buckets[i], end = groups_.buckets[i + 1];
    const int64_t bucket = groups_.rows[begin].bucket;
    __builtin_prefetch(state_.bucket_steps + bucket, 1);
    PrefetchFloats(state_.second_moment + bucket * state_.dim, state_.dim);
    if (bucket < state_.first_moment_rows) {
      PrefetchFloats(state_.first_moment + bucket * state_.dim, state_.dim);
    }
    for (int64_t r = begin; r < std::min(begin + 4, end); ++r) {
      const RowGroup& row = groups_.rows[r];
      PrefetchFloats(state_.table + row.row * state_.dim, state_.dim);
      if (state_.row_scalar != nullptr) {
        __builtin_prefetch(state_.row_scalar + row.row, 1);
      }
      for (int64_t k = 0; k < std::min<int64_t>(row.count, 4); ++k) {
        PrefetchFloats(Value(groups_.positions[row.first + k]), state_.dim);
      }
    }
  }

  void Update(int64_t i) {
    const int64_t begin = groups_.buckets[i], end = groups_.buckets[i + 1];
    const int64_t dim = state_.dim;
    const int64_t bucket = groups_.rows[begin].bucket;
    SumDuplicates(begin, end);

    int32_t& steps = state_.bucket_steps[bucket];
    float* v = state_.second_moment + bucket * dim;
    float* m = bucket < state_.first_moment_rows
                   ? state_.first_moment + bucket * dim
                   : nullptr;
    // The rows of a bucket that has no first moment do not learn.
    if (rule_.scalar == RowScalar::kLearned && m != nullptr && steps > 0) {
      LearnScalars(begin, end, m, v, steps);
    }

    if (rule_.reduce == CollisionReduce::kSequential) {
      steps += static_cast<int32_t>(end - begin);
      for (const float* g : gradients_) {
        if (m != nullptr) Decay(m, rule_.beta_1, g);
        DecaySquare(v, rule_.beta_2, g);
      }
    } else {
      steps += 1;
      if (m != nullptr) Decay(m, rule_.beta_1, Reduced());
      if (gradients_.size() == 1) {
        DecaySquare(v, rule_.beta_2, gradients_[0]);
      } else {
        Decay(v, rule_.beta_2, ReducedSquare());
      }
    }

    const bool correct = rule_.bias_correction;
    const double c2 = correct ? BiasCorrection(rule_.beta_2, steps) : 1.0;
    const double c1 =
        correct && m != nullptr ? BiasCorrection(rule_.beta_1, steps) : 1.0;
    const double v_hat_mean = Denominators(v, c2);
    const bool owner = bucket < state_.owners;
    for (int64_t r = begin; r < end; ++r) {
      const float* g = gradients_[r - begin];
      const int64_t row = groups_.rows[r].row;
      const double scalar = Scalar(row, g, v_hat_mean, owner);
      // A first moment exists exactly for the buckets whose rows follow it.
      Move(state_.table + row * dim, m != nullptr ? m : g,
           learning_rate_ * scalar * c1);
    }
  }

 private:
  const float* Value(int64_t position) const {
    return values_ + position * state_.dim;
  }

  // Fills gradients_ with one vector per row of the bucket. A row that came
  // once and is not clipped is read where it lies.
  void SumDuplicates(int64_t begin, int64_t end) {
    const int64_t dim = state_.dim;
    gradients_.resize(end - begin);
    const bool clip = rule_.row_clipnorm > 0;
    owned_.resize(static_cast<size_t>((end - begin) * dim));
    for (int64_t r = begin; r < end; ++r) {
      const RowGroup& row = groups_.rows[r];
      const float* only = Value(groups_.positions[row.first]);
      gradients_[r - begin] = only;
      if (row.count == 1 && !clip) continue;
      std::copy_n(only, dim, sum_.begin());
      for (int64_t k = 1; k < row.count; ++k) {
        const float* g = Value(groups_.positions[row.first + k]);
        for (int64_t j = 0; j < dim; ++j) sum_[j] += g[j];
      }
      double scale = 1.0;
      if (clip) {
        const double* sum = sum_.data();
        const double norm = std::sqrt(
            LaneSum(dim, [sum](int64_t j) { return sum[j] * sum[j]; }));
        if (norm > rule_.row_clipnorm) scale = rule_.row_clipnorm / norm;
      }
      float* out = owned_.data() + (r - begin) * dim;
      for (int64_t j = 0; j < dim; ++j) {
        out[j] = static_cast<float>(sum_[j] * scale);
      }
      gradients_[r - begin] = out;
    }
  }

  // moment <- beta * moment + (1 - beta) * x
  void Decay(float* moment, double beta, const float* x) const {
    const float keep = static_cast<float>(beta);
    const float take = static_cast<float>(1.0 - beta);
    for (int64_t j = 0; j < state_.dim; ++j) {
      moment[j] = keep * moment[j] + take * x[j];
    }
  }

  // moment <- beta * moment + (1 - beta) * x^2
  void DecaySquare(float* moment, double beta, const float* x) const {
    const float keep = static_cast<float>(beta);
    const float take = static_cast<float>(1.0 - beta);
    for (int64_t j = 0; j < state_.dim; ++j) {
      moment[j] = keep * moment[j] + take * (x[j] * x[j]);
    }
  }

  double ReduceScale() const {
    return rule_.reduce == CollisionReduce::kMean
               ? 1.0 / static_cast<double>(gradients_.size())
               : 1.0;
  }

  const float* Reduced() {
    if (gradients_.size() == 1) return gradients_[0];
    std::fill(sum_.begin(), sum_.end(), 0.0);
    for (const float* g : gradients_) {
      for (int64_t j = 0; j < state_.dim; ++j) sum_[j] += g[j];
    }
    return ScaledSum();
  }

  const float* ReducedSquare() {
    std::fill(sum_.begin(), sum_.end(), 0.0);
    for (const float* g : gradients_) {
      for (int64_t j = 0; j < state_.dim; ++j) {
        sum_[j] += static_cast<double>(g[j]) * g[j];
      }
    }
    return ScaledSum();
  }

  const float* ScaledSum() {
    const double scale = ReduceScale();
    for (int64_t j = 0; j < state_.dim; ++j) {
      mean_[j] = static_cast<float>(sum_[j] * scale);
    }
    return mean_.data();
  }

  // Fills denominator_ with sqrt(v_hat) + epsilon; returns the mean of v_hat.
  double Denominators(const float* v, double correction) {
    const float c = static_cast<float>(correction);
    const float epsilon = static_cast<float>(rule_.epsilon);
    float* out = denominator_.data();
    for (int64_t j = 0; j < state_.dim; ++j) {
      out[j] = std::sqrt(v[j] * c) + epsilon;
    }
    return LaneSum(state_.dim, [v, c](int64_t j) { return v[j] * c; }) /
           static_cast<double>(state_.dim);
  }

  // The learned scalars move along the agreement of each row's gradient with
  // the bucket's direction as it was before this step.
  void LearnScalars(int64_t begin, int64_t end, const float* m, const float* v,
                    int64_t steps) {
    const int64_t dim = state_.dim;
    const bool correct = rule_.bias_correction;
    const double c1 = correct ? BiasCorrection(rule_.beta_1, steps) : 1.0;
    const double c2 = correct ? BiasCorrection(rule_.beta_2, steps) : 1.0;
    double* u = preview_.data();
    for (int64_t j = 0; j < dim; ++j) {
      u[j] = m[j] * c1 / (std::sqrt(v[j] * c2) + rule_.epsilon);
    }
    const double u_square = LaneSum(dim, [u](int64_t j) { return u[j] * u[j]; });
    for (int64_t r = begin; r < end; ++r) {
      const float* g = gradients_[r - begin];
      const double agreement =
          LaneSum(dim, [u, g](int64_t j) { return u[j] * g[j]; });
      float& stored = state_.row_scalar[groups_.rows[r].row];
      double s = stored;
      const double rate = rule_.scalar_learning_rate;
      switch (rule_.scalar_rule) {
        case ScalarRule::kGradient:
          s += rate * rule_.learning_rate * agreement;
          break;
        case ScalarRule::kSign:
          s += rate * ((agreement > 0) - (agreement < 0));
          break;
        case ScalarRule::kLog:
          s *= std::exp(rate * agreement /
                        (std::sqrt(u_square * SquaredNorm(g, dim)) + 1e-30));
          break;
      }
      stored = static_cast<float>(Clip(s));
    }
  }

  double Clip(double s) const {
    return std::min(std::max(s, rule_.scalar_min), rule_.scalar_max);
  }

  // The factor of this row's step; moves its energy in the energy mode.
  double Scalar(int64_t row, const float* g, double v_hat_mean, bool owner) {
    if (rule_.scalar == RowScalar::kLearned) return state_.row_scalar[row];
    if (rule_.scalar == RowScalar::kNone || owner) return 1.0;
    const double energy =
        SquaredNorm(g, state_.dim) / static_cast<double>(state_.dim);
    float& q = state_.row_scalar[row];
    q = static_cast<float>(q == 0.0f ? energy
                                     : rule_.scalar_decay * q +
                                           (1.0 - rule_.scalar_decay) * energy);
    return q == 0.0f ? 1.0 : Clip(std::sqrt(v_hat_mean / q));
  }

  // row <- row - lr * wd * row - step * direction / denominator
  void Move(float* row, const float* direction, double step) const {
    const float rate = static_cast<float>(step);
    if (rule_.weight_decay > 0) {
      const float decay =
          static_cast<float>(learning_rate_ * rule_.weight_decay);
      for (int64_t j = 0; j < state_.dim; ++j) row[j] -= decay * row[j];
    }
    for (int64_t j = 0; j < state_.dim; ++j) {
      row[j] -= rate * direction[j] / denominator_[j];
    }
  }

  const BasisAdamRule& rule_;
  const BasisAdamState& state_;
  const RowGroups& groups_;
  const float* values_;
  const double learning_rate_;
  std::vector<const float*> gradients_;
  std::vector<float> owned_;
  std::vector<double> sum_;
  std::vector<float> mean_;
  std::vector<float> denominator_;
  std::vector<double> preview_;
};

// `values[i]` is the gradient of the row at batch position i.
inline void ApplyBasisAdam(const BasisAdamRule& rule,
                           const BasisAdamState& state, const RowGroups& groups,
                           const float* values,
                           const ParallelFor& parallel_for) {
  constexpr int64_t kAhead = 4;
  const int64_t cost = 400 + 20 * state.dim;
  parallel_for(groups.num_buckets(), cost, [&](int64_t begin, int64_t end) {
    BasisAdamBucket bucket(rule, state, groups, values);
    for (int64_t i = begin; i < std::min(begin + kAhead, end); ++i) {
      bucket.Prefetch(i);
    }
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) bucket.Prefetch(i + kAhead);
      bucket.Update(i);
    }
  });
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BASIS_ADAM_H_
