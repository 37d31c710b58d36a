// One step on the touched rows and buckets of one table, in place.
// The rule is written down in docs/basis_adam.md; tf_basis/rules/bucket.py is
// the pure-TensorFlow twin, operation by operation, so that the bits agree.
#ifndef TF_BASIS_CORE_BUCKET_UPDATE_H_
#define TF_BASIS_CORE_BUCKET_UPDATE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/bucket_moments.h"
#include "core/learned_scalar.h"
#include "core/row_groups.h"

namespace tf_basis {

// Works on one bucket or row at a time; one per thread, since it owns scratch
// memory. With one bucket a row, UpdateBucketAndRows does all in one visit.
// With two, all rows learn, then all buckets move, then all rows.
class BucketStepper : public BucketMoments {
 public:
  BucketStepper(const BucketRule& rule, const TableState& state,
                const RowGroups& groups, const float* values)
      : BucketMoments(rule, state, /*scratch_rows=*/5),
        learned_(rule, state),
        groups_(groups),
        values_(values),
        denominator_(dim_),
        direction_(dim_) {}

  // The Prefetch functions ask for memory that will be needed soon: of a bucket
  // and its first rows,
  void PrefetchBucketAndRows(int64_t i) const {
    const TouchedBucket& bucket = groups_.buckets[i];
    PrefetchMoments(bucket.bucket);
    for (int64_t k = 0; k < std::min<int64_t>(bucket.count, 4); ++k) {
      const TouchedRow& row = groups_.rows[groups_.members[bucket.first + k]];
      PrefetchRow(row);
      PrefetchValues(row);
    }
  }

  // of a bucket's state,
  void PrefetchMoments(int64_t bucket) const {
    PrefetchBytes(state_.bucket_steps + bucket, sizeof(int32_t));
    if (state_.second_moment) state_.second_moment.Prefetch(bucket);
    if (HasFirstMoment(bucket)) state_.first_moment.Prefetch(bucket);
  }

  // of a row of the table,
  void PrefetchRow(const TouchedRow& row) const {
    state_.table.Prefetch(row.row);
    if (state_.row_scalar) state_.row_scalar.Prefetch(row.row);
  }

  // and of a row's first gradients.
  void PrefetchValues(const TouchedRow& row) const {
    for (int64_t copy = 0; copy < std::min<int64_t>(row.count, 4); ++copy) {
      PrefetchBytes(Value(groups_.positions[row.first + copy]),
                    dim_ * sizeof(float));
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
        learned_.Learn(groups_.rows[members[k]], gradients_[k],
                       /*fresh=*/k == 0);
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

  void LearnScalar(const TouchedRow& row, const float* g) {
    learned_.Learn(row, g, /*fresh=*/true);
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
    const float c2 = static_cast<float>(Correction(rule_.second_keep, steps_));
    float* hat = denominator_.data();  // v_hat until it is turned below
    if (state_.second_moment) {
      const float* v = state_.second_moment.Open(b, Scratch(1));
      for (int64_t j = 0; j < dim_; ++j) hat[j] = v[j] * c2;
    }
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
      if (state_.second_moment) {
        const float* v2 = state_.second_moment.Open(other, Scratch(3));
        const float e2 =
            static_cast<float>(Correction(rule_.second_keep, other_steps));
        for (int64_t j = 0; j < dim_; ++j) {
          hat[j] = std::min(hat[j], v2[j] * e2);
        }
      }
      steps_ = std::max(steps_, other_steps);
    }
    moment_ = m;
    moment_scale_ = m != nullptr ? c1 : 1.0;
    if (!state_.second_moment) return;
    Saturate(hat, dim_);
    v_hat_mean_ = LaneSum(dim_, [hat](int64_t j) { return hat[j]; }) /
                  static_cast<double>(dim_);
    const float epsilon = static_cast<float>(rule_.epsilon);
    for (int64_t j = 0; j < dim_; ++j) hat[j] = std::sqrt(hat[j]) + epsilon;
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
      votes = std::min(votes, Leaders::kMostVotes - 1) + 1;
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
        state_.row_scalar.Write(row, static_cast<float>(Saturated(q)), key);
    return stored == 0 || owner_ ? 1.0
                                 : ClipScalar(std::sqrt(v_hat_mean_ / stored));
  }

  LearnedScalar learned_;
  const RowGroups& groups_;
  const float* values_;
  std::vector<const float*> gradients_;
  std::vector<float> owned_;
  std::vector<float> denominator_;
  std::vector<float> direction_;
  // What Read found.
  bool owner_ = false, follows_ = false;
  int32_t steps_ = 0;
  const float* moment_ = nullptr;
  double moment_scale_ = 1;
  double v_hat_mean_ = 0;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BUCKET_UPDATE_H_
