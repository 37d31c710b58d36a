// One step on the touched rows and buckets of one table, in place.
// The rule is written down in docs/basis_adam.md; tf_basis/rules/bucket.py is
// the pure-TensorFlow twin, operation by operation, so that the bits agree.
#ifndef TF_BASIS_CORE_BUCKET_UPDATE_H_
#define TF_BASIS_CORE_BUCKET_UPDATE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/bucket_rule.h"
#include "core/columns.h"
#include "core/row_groups.h"

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

// Works on one bucket or row at a time; one per thread, since it owns scratch
// memory. With one bucket a row, UpdateBucketAndRows does all in one visit.
// With two, all rows learn, then all buckets move, then all rows.
class BucketStepper {
 public:
  BucketStepper(const BucketRule& rule, const TableState& state,
                const RowGroups& groups, const float* values)
      : rule_(rule),
        state_(state),
        groups_(groups),
        values_(values),
        dim_(state.dim),
        sum_(dim_),
        reduced_(dim_),
        denominator_(dim_),
        direction_(dim_),
        preview_(dim_),
        scratch_(5 * dim_) {}

  // Asks for the memory of a bucket that will be updated soon.
  void Prefetch(int64_t i) const {
    const TouchedBucket& bucket = groups_.buckets[i];
    PrefetchBytes(state_.bucket_steps + bucket.bucket, sizeof(int32_t));
    if (state_.second_moment) state_.second_moment.Prefetch(bucket.bucket);
    if (HasFirstMoment(bucket.bucket)) {
      state_.first_moment.Prefetch(bucket.bucket);
    }
    for (int64_t k = 0; k < std::min<int64_t>(bucket.count, 4); ++k) {
      const TouchedRow& row = groups_.rows[groups_.members[bucket.first + k]];
      state_.table.Prefetch(row.row);
      if (state_.row_scalar) state_.row_scalar.Prefetch(row.row);
      for (int64_t copy = 0; copy < std::min<int64_t>(row.count, 4); ++copy) {
        PrefetchBytes(Value(groups_.positions[row.first + copy]),
                      dim_ * sizeof(float));
      }
    }
  }

  void UpdateBucketAndRows(int64_t i) {
    const TouchedBucket& bucket = groups_.buckets[i];
    const int64_t* members = groups_.members.data() + bucket.first;
    gradients_.resize(bucket.count);
    owned_.resize(bucket.count * dim_);
    for (int64_t k = 0; k < bucket.count; ++k) {
      gradients_[k] =
          SumDuplicates(groups_.rows[members[k]], owned_.data() + k * dim_);
    }
    if (rule_.scalar == RowScalar::kLearned) {
      for (int64_t k = 0; k < bucket.count; ++k) {
        LearnScalar(groups_.rows[members[k]], gradients_[k], /*fresh=*/k == 0);
      }
    }
    if (state_.leader != nullptr) {
      UpdateLedBucket(bucket, members);
      return;
    }
    UpdateBucket(bucket.bucket, gradients_.data(), bucket.count,
                 gradients_.data(), bucket.count);
    Read(groups_.rows[members[0]]);
    for (int64_t k = 0; k < bucket.count; ++k) {
      MoveRow(groups_.rows[members[k]], gradients_[k]);
    }
  }

  // The gradient of a row: where it lies if it came once, else its sum in
  // `own`.
  const float* SumDuplicates(const TouchedRow& row, float* own) {
    const float* only = Value(groups_.positions[row.first]);
    const bool clip = rule_.row_clipnorm > 0;
    if (row.count == 1 && !clip) return only;
    double* sum = sum_.data();
    std::copy_n(only, dim_, sum);
    for (int64_t k = 1; k < row.count; ++k) {
      const float* g = Value(groups_.positions[row.first + k]);
      for (int64_t j = 0; j < dim_; ++j) sum[j] += g[j];
    }
    for (int64_t j = 0; j < dim_; ++j) own[j] = static_cast<float>(sum[j]);
    if (!clip) return own;
    const double norm = std::sqrt(SquaredNorm(own, dim_));
    if (norm > rule_.row_clipnorm) {
      const double scale = rule_.row_clipnorm / norm;
      for (int64_t j = 0; j < dim_; ++j) {
        own[j] = static_cast<float>(own[j] * scale);
      }
    }
    return own;
  }

  // Moves the learned scalar of a row along the agreement of its gradient with
  // the bucket's direction as it was before this step. `fresh`: the buckets are
  // not those of the row before.
  void LearnScalar(const TouchedRow& row, const float* g, bool fresh) {
    if (state_.row_steps != nullptr) {
      int32_t& count = state_.row_steps[row.row];
      count = SaturatingAdd(count, 1);
    }
    if (!Learns(row)) return;
    if (fresh) Preview(row);
    const double* u = preview_.data();
    const double agreement =
        LaneSum(dim_, [u, g](int64_t j) { return u[j] * g[j]; });
    const double rate = rule_.scalar_learning_rate * FrequencyWeight(row);
    double s = state_.row_scalar.Read(row.row);
    switch (rule_.scalar_rule) {
      case ScalarRule::kGradient:
        s += rate * rule_.learning_rate * agreement;
        break;
      case ScalarRule::kSign:
        s += rate * ((agreement > 0) - (agreement < 0));
        break;
      case ScalarRule::kLog:
        s *= std::exp(
            rate * agreement /
            (std::sqrt(preview_square_ * SquaredNorm(g, dim_)) + 1e-30));
        break;
    }
    state_.row_scalar.Write(row.row, static_cast<float>(ClipScalar(s)),
                            Key(kRowScalarSlot, row.row, 0));
  }

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
      state_.second_moment.Close(b, v, Key(kSecondMomentSlot, b, steps));
    }
  }

  // Reads the moments that a row follows, after its buckets were updated.
  void Read(const TouchedRow& row) {
    const int64_t b = row.buckets[0];
    owner_ = b < state_.owners;
    follows_ = HasFirstMoment(b);
    steps_ = state_.bucket_steps[b];
    double c1 = Correction(rule_.first_keep, FirstSteps(b));
    const float* m =
        follows_ ? state_.first_moment.Open(b, Scratch(0)) : nullptr;
    const float* v = state_.second_moment
                         ? state_.second_moment.Open(b, Scratch(1))
                         : nullptr;
    float c2 = static_cast<float>(Correction(rule_.second_keep, steps_));
    if (row.num_buckets == 2) {
      const int64_t other = row.buckets[1];
      const int32_t other_steps = state_.bucket_steps[other];
      if (m != nullptr) {
        const float* m2 = state_.first_moment.Open(other, Scratch(2));
        const float d1 = static_cast<float>(c1);
        const float d2 =
            static_cast<float>(Correction(rule_.first_keep, other_steps));
        float* mean = Scratch(4);
        for (int64_t j = 0; j < dim_; ++j) {
          mean[j] = 0.5f * (m[j] * d1 + m2[j] * d2);
        }
        m = mean;
        c1 = 1.0;
      }
      if (v != nullptr) {
        const float* v2 = state_.second_moment.Open(other, Scratch(3));
        const float e2 =
            static_cast<float>(Correction(rule_.second_keep, other_steps));
        float* least = denominator_.data();  // v_hat until it is turned below
        for (int64_t j = 0; j < dim_; ++j) {
          least[j] = std::min(v[j] * c2, v2[j] * e2);
        }
        v = least;
        c2 = 1.0f;
      }
      steps_ = std::max(steps_, other_steps);
    }
    moment_ = m;
    moment_scale_ = m != nullptr ? c1 : 1.0;
    if (v == nullptr) return;
    v_hat_mean_ = LaneSum(dim_, [v, c2](int64_t j) { return v[j] * c2; }) /
                  static_cast<double>(dim_);
    const float epsilon = static_cast<float>(rule_.epsilon);
    float* out = denominator_.data();
    for (int64_t j = 0; j < dim_; ++j) {
      out[j] = std::sqrt(v[j] * c2) + epsilon;
    }
  }

  // Moves a row along what Read found.
  void MoveRow(const TouchedRow& row, const float* g) {
    const RoundingKey energy_key = Key(kRowScalarSlot, row.row, steps_);
    const double scalar = Scalar(row.row, g, energy_key);
    const float* direction = g;
    double step = rule_.learning_rate * scalar;
    if (moment_ != nullptr && rule_.nesterov) {
      const float keep = static_cast<float>(rule_.first_keep);
      float* ahead = direction_.data();
      for (int64_t j = 0; j < dim_; ++j) ahead[j] = g[j] + keep * moment_[j];
      direction = ahead;
    } else if (moment_ != nullptr) {
      direction = moment_;
      step *= moment_scale_;
    }
    const float rate = static_cast<float>(step);
    float* out = state_.table.Open(row.row, Scratch(2));
    if (rule_.weight_decay > 0) {
      const float decay =
          static_cast<float>(rule_.learning_rate * rule_.weight_decay);
      for (int64_t j = 0; j < dim_; ++j) out[j] -= decay * out[j];
    }
    if (state_.second_moment) {
      const float* below = denominator_.data();
      for (int64_t j = 0; j < dim_; ++j) {
        out[j] -= rate * direction[j] / below[j];
      }
    } else {
      for (int64_t j = 0; j < dim_; ++j) out[j] -= rate * direction[j];
    }
    state_.table.Close(row.row, out, Key(kTableSlot, row.row, steps_));
  }

 private:
  const float* Value(int64_t position) const {
    return values_ + position * dim_;
  }

  float* Scratch(int i) { return scratch_.data() + i * dim_; }

  // How many steps the first moment of a bucket has seen.
  int32_t FirstSteps(int64_t bucket) const {
    return state_.leader != nullptr ? state_.leader_steps[bucket]
                                    : state_.bucket_steps[bucket];
  }

  // Steps of the optimizer that a bucket with stale decay was not touched in.
  int64_t Missed(int64_t bucket) const {
    if (state_.last_step == nullptr || state_.bucket_steps[bucket] == 0)
      return 0;
    return std::max<int64_t>(rule_.step - state_.last_step[bucket] - 1, 0);
  }

  // moment <- keep * moment + take * x once for each row, as one sum.
  void TakeInOrder(float* moment, double keep, double take,
                   const float* const* g, int64_t count, bool square) {
    double* sum = sum_.data();
    std::fill_n(sum, dim_, 0.0);
    for (int64_t k = 0; k < count; ++k) {
      const double weight = take * IntegerPower(keep, count - 1 - k);
      for (int64_t j = 0; j < dim_; ++j) {
        const double x = g[k][j];
        sum[j] += weight * (square ? x * x : x);
      }
    }
    const double kept = IntegerPower(keep, count);
    for (int64_t j = 0; j < dim_; ++j) {
      moment[j] = static_cast<float>(moment[j] * kept + sum[j]);
    }
  }

  // A step on a bucket whose owner is found during training.
  void UpdateLedBucket(const TouchedBucket& bucket, const int64_t* members) {
    const int64_t b = bucket.bucket;
    int64_t& leader = state_.leader[b];
    int32_t& votes = state_.leader_votes[b];
    int32_t& first_steps = state_.leader_steps[b];
    if (first_steps > 0) first_steps = SaturatingAdd(first_steps, Missed(b));
    int64_t at = bucket.count;  // the leader among the members
    for (int64_t k = 0; k < bucket.count; ++k) {
      if (votes > 0 && groups_.rows[members[k]].row == leader) at = k;
    }
    if (at < bucket.count) {
      votes = std::min(votes + 1, Leaders::kMostVotes);
    } else if (votes > 0) {
      --votes;
    } else {
      at = 0;
      leader = groups_.rows[members[0]].row;
      votes = 1;
      first_steps = 0;
      if (HasFirstMoment(b)) {
        float* m = state_.first_moment.Open(b, Scratch(0));
        std::fill_n(m, dim_, 0.0f);
        state_.first_moment.Close(b, m, Key(kFirstMomentSlot, b, 0));
      }
    }
    const bool present = at < bucket.count;
    const bool owned = votes >= Leaders::kVotesToOwn;
    const float* const* g = gradients_.data();
    if (present) first_steps = SaturatingAdd(first_steps, 1);
    UpdateBucket(b, g + at, present ? 1 : 0, owned ? g + at : g,
                 owned ? (present ? 1 : 0) : bucket.count);
    Read(groups_.rows[members[0]]);
    const float* moment = moment_;
    for (int64_t k = 0; k < bucket.count; ++k) {
      owner_ = owned && k == at;
      moment_ = owner_ ? moment : nullptr;
      MoveRow(groups_.rows[members[k]], gradients_[k]);
    }
  }

  bool HasFirstMoment(int64_t bucket) const {
    return bucket < state_.first_moment_rows;
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

  // The mean or sum over the rows of a bucket of g or g^2.
  const float* Reduce(const float* const* g, int64_t count, bool square) {
    double* sum = sum_.data();
    std::fill_n(sum, dim_, 0.0);
    for (int64_t k = 0; k < count; ++k) {
      const float* x = g[k];
      if (square) {
        for (int64_t j = 0; j < dim_; ++j) {
          sum[j] += static_cast<double>(x[j]) * x[j];
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
      out[j] = static_cast<float>(sum[j] / divisor);
    }
    return out;
  }

  // The rows of a bucket that has no first moment do not learn, nor do rows
  // with a bucket that has seen nothing yet.
  bool Learns(const TouchedRow& row) const {
    for (int k = 0; k < row.num_buckets; ++k) {
      if (!HasFirstMoment(row.buckets[k])) return false;
      if (state_.bucket_steps[row.buckets[k]] == 0) return false;
    }
    return true;
  }

  // preview_ <- u = m_hat / (sqrt(v_hat) + epsilon), before this step.
  void Preview(const TouchedRow& row) {
    const int n = row.num_buckets;
    const float* m[2] = {nullptr, nullptr};
    const float* v[2] = {nullptr, nullptr};
    double c1[2] = {1, 1}, c2[2] = {1, 1};
    for (int k = 0; k < n; ++k) {
      const int64_t b = row.buckets[k];
      m[k] = state_.first_moment.Open(b, Scratch(2 * k));
      if (state_.second_moment) {
        v[k] = state_.second_moment.Open(b, Scratch(2 * k + 1));
      }
      c1[k] = Correction(rule_.first_keep, state_.bucket_steps[b]);
      c2[k] = Correction(rule_.second_keep, state_.bucket_steps[b]);
    }
    double* u = preview_.data();
    for (int64_t j = 0; j < dim_; ++j) {
      double m_hat = m[0][j] * c1[0];
      if (n == 2) m_hat = 0.5 * (m_hat + m[1][j] * c1[1]);
      u[j] = m_hat;
      if (v[0] == nullptr) continue;
      double v_hat = v[0][j] * c2[0];
      if (n == 2) v_hat = std::min(v_hat, v[1][j] * c2[1]);
      u[j] /= std::sqrt(v_hat) + rule_.epsilon;
    }
    preview_square_ = LaneSum(dim_, [u](int64_t j) { return u[j] * u[j]; });
  }

  // Rare rows may learn faster: (share of the bucket's steps) ^ -power.
  double FrequencyWeight(const TouchedRow& row) const {
    if (state_.row_steps == nullptr) return 1.0;
    int64_t steps = 0;
    for (int k = 0; k < row.num_buckets; ++k) {
      steps = std::max<int64_t>(steps, state_.bucket_steps[row.buckets[k]]);
    }
    const double share =
        static_cast<double>(state_.row_steps[row.row]) / (steps + 1.0);
    return std::pow(std::min(share, 1.0), -rule_.frequency_power);
  }

  // The factor of this row's step; moves its energy in the energy mode.
  double Scalar(int64_t row, const float* g, const RoundingKey& key) {
    if (rule_.scalar == RowScalar::kLearned) return state_.row_scalar.Read(row);
    if (rule_.scalar == RowScalar::kNone) return 1.0;
    // A leader may lose its bucket again, so its energy is kept up to date.
    if (owner_ && state_.leader == nullptr) return 1.0;
    const double energy = SquaredNorm(g, dim_) / static_cast<double>(dim_);
    const double old = state_.row_scalar.Read(row);
    const double q = old == 0
                         ? energy
                         : rule_.energy_keep * old + rule_.energy_take * energy;
    const float stored =
        state_.row_scalar.Write(row, static_cast<float>(q), key);
    return stored == 0 || owner_ ? 1.0
                                 : ClipScalar(std::sqrt(v_hat_mean_ / stored));
  }

  const BucketRule& rule_;
  const TableState& state_;
  const RowGroups& groups_;
  const float* values_;
  const int64_t dim_;
  std::vector<const float*> gradients_;
  std::vector<float> owned_;
  std::vector<double> sum_;
  std::vector<float> reduced_;
  std::vector<float> denominator_;
  std::vector<float> direction_;
  std::vector<double> preview_;
  double preview_square_ = 0;
  std::vector<float> scratch_;
  // What Read found.
  bool owner_ = false, follows_ = false;
  int32_t steps_ = 0;
  const float* moment_ = nullptr;
  double moment_scale_ = 1;
  double v_hat_mean_ = 0;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BUCKET_UPDATE_H_
