// The learned scalar of a row: how long its steps are, learned from whether
// they agree with its gradients.
#ifndef TF_BASIS_CORE_LEARNED_SCALAR_H_
#define TF_BASIS_CORE_LEARNED_SCALAR_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/bucket_access.h"
#include "core/row_groups.h"

namespace tf_basis {

class LearnedScalar : private BucketAccess {
 public:
  LearnedScalar(const BucketRule& rule, const TableState& state)
      : BucketAccess(rule, state, rule.scalar == RowScalar::kLearned ? 4 : 0),
        preview_(rule.scalar == RowScalar::kLearned ? state.dim : 0) {}

  // Moves the learned scalar of a row along the agreement of its gradient with
  // the bucket's direction as it was before this step. `fresh`: the buckets are
  // not those of the row before.
  void Learn(const TouchedRow& row, const float* g, bool fresh) {
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

 private:
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
      v_hat = Saturated(v_hat);
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

  std::vector<double> preview_;
  double preview_square_ = 0;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_LEARNED_SCALAR_H_
