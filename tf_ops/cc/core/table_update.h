// One step on a table: shares the touched buckets and rows out to threads.
#ifndef TF_BASIS_CORE_TABLE_UPDATE_H_
#define TF_BASIS_CORE_TABLE_UPDATE_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/bucket_update.h"
#include "core/parallel.h"
#include "core/wide.h"

namespace tf_basis {

// The memory of a block of buckets is asked for at once: the misses overlap
// then, those of the address translation too, which weigh most in a large
// table.
TF_BASIS_WIDE inline void UpdateBuckets(BucketStepper* stepper, int64_t begin,
                                        int64_t end) {
  constexpr int64_t kBlock = 16;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t last = std::min(first + kBlock, end);
    for (int64_t i = first; i < last; ++i) stepper->Prefetch(i);
    for (int64_t i = first; i < last; ++i) stepper->UpdateBucketAndRows(i);
  }
}

// `values[i]` is the gradient of the row at batch position i.
inline void UpdateTable(const BucketRule& rule, const TableState& state,
                        const RowGroups& groups, const float* values,
                        bool two_buckets, const ParallelFor& parallel_for) {
  const int64_t cost = 400 + 20 * state.dim;
  const int64_t n_buckets = static_cast<int64_t>(groups.buckets.size());
  if (!two_buckets) {
    parallel_for(n_buckets, cost, [&](int64_t begin, int64_t end) {
      BucketStepper stepper(rule, state, groups, values);
      UpdateBuckets(&stepper, begin, end);
    });
    return;
  }
  const int64_t n_rows = static_cast<int64_t>(groups.rows.size());
  std::vector<float> owned(n_rows * state.dim);
  std::vector<const float*> gradients(n_rows);
  parallel_for(n_rows, cost, [&](int64_t begin, int64_t end) {
    BucketStepper stepper(rule, state, groups, values);
    for (int64_t r = begin; r < end; ++r) {
      gradients[r] =
          stepper.SumDuplicates(groups.rows[r], owned.data() + r * state.dim);
      if (rule.scalar == RowScalar::kLearned) {
        stepper.LearnScalar(groups.rows[r], gradients[r], /*fresh=*/true);
      }
    }
  });
  parallel_for(n_buckets, cost, [&](int64_t begin, int64_t end) {
    BucketStepper stepper(rule, state, groups, values);
    std::vector<const float*> members;
    for (int64_t i = begin; i < end; ++i) {
      const TouchedBucket& bucket = groups.buckets[i];
      members.clear();
      for (int64_t k = 0; k < bucket.count; ++k) {
        members.push_back(gradients[groups.members[bucket.first + k]]);
      }
      stepper.UpdateBucket(bucket.bucket, members.data(), bucket.count,
                           members.data(), bucket.count);
    }
  });
  parallel_for(n_rows, cost, [&](int64_t begin, int64_t end) {
    BucketStepper stepper(rule, state, groups, values);
    for (int64_t r = begin; r < end; ++r) {
      stepper.Read(groups.rows[r]);
      stepper.MoveRow(groups.rows[r], gradients[r]);
    }
  });
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_TABLE_UPDATE_H_
