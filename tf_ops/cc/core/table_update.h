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

// The memory of a block of visits is asked for at once: the misses overlap
// then, those of the address translation too, which weigh most in a large
// table.
template <typename Prefetch, typename Visit>
void InBlocks(int64_t begin, int64_t end, const Prefetch& prefetch,
              const Visit& visit) {
  constexpr int64_t kBlock = 16;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t last = std::min(first + kBlock, end);
    for (int64_t i = first; i < last; ++i) prefetch(i);
    for (int64_t i = first; i < last; ++i) visit(i);
  }
}

TF_BASIS_WIDE inline void UpdateBuckets(BucketStepper* stepper, int64_t begin,
                                        int64_t end) {
  InBlocks(
      begin, end, [&](int64_t i) { stepper->PrefetchBucketAndRows(i); },
      [&](int64_t i) { stepper->UpdateBucketAndRows(i); });
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
    const bool learns = rule.scalar == RowScalar::kLearned;
    InBlocks(
        begin, end, [&](int64_t r) { stepper.PrefetchValues(groups.rows[r]); },
        [&](int64_t r) {
          const TouchedRow& row = groups.rows[r];
          float* own = owned.data() + r * state.dim;
          gradients[r] = stepper.SumDuplicates(row, own);
          if (learns) stepper.LearnScalar(row, gradients[r]);
        });
  });
  parallel_for(n_buckets, cost, [&](int64_t begin, int64_t end) {
    BucketStepper stepper(rule, state, groups, values);
    std::vector<const float*> members;
    InBlocks(
        begin, end,
        [&](int64_t i) { stepper.PrefetchMoments(groups.buckets[i].bucket); },
        [&](int64_t i) {
          const TouchedBucket& bucket = groups.buckets[i];
          members.clear();
          for (int64_t k = 0; k < bucket.count; ++k) {
            members.push_back(gradients[groups.members[bucket.first + k]]);
          }
          stepper.UpdateBucket(bucket.bucket, members.data(), bucket.count,
                               members.data(), bucket.count);
        });
  });
  parallel_for(n_rows, cost, [&](int64_t begin, int64_t end) {
    BucketStepper stepper(rule, state, groups, values);
    InBlocks(
        begin, end,
        [&](int64_t r) {
          const TouchedRow& row = groups.rows[r];
          stepper.PrefetchRow(row);
          for (int k = 0; k < row.num_buckets; ++k) {
            stepper.PrefetchMoments(row.buckets[k]);
          }
        },
        [&](int64_t r) {
          stepper.Read(groups.rows[r]);
          stepper.MoveRow(groups.rows[r], gradients[r]);
        });
  });
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_TABLE_UPDATE_H_
