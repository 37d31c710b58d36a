// Orders a batch of row ids by (bucket, row), duplicates together in batch
// order. Everything that follows depends on this order alone, which is why the
// result of a step does not depend on the number of threads.
#ifndef TF_BASIS_CORE_ROW_GROUPS_H_
#define TF_BASIS_CORE_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "core/hash.h"
#include "core/parallel.h"
#include "core/radix_sort.h"

namespace tf_basis {

struct RowGroup {
  int64_t row;
  int64_t bucket;
  int64_t first;  // its gradients are positions[first .. first + count)
  int64_t count;
};

struct RowGroups {
  std::vector<int64_t> positions;  // batch positions, by row, then batch order
  std::vector<RowGroup> rows;      // distinct rows, by (bucket, row)
  std::vector<int64_t> buckets;    // rows[buckets[i] .. buckets[i + 1]) share one

  int64_t num_buckets() const {
    return static_cast<int64_t>(buckets.size()) - 1;
  }
};

// `indices[i]` in [0, n_rows) for i < n.
template <typename Index>
RowGroups GroupRows(const Index* indices, int64_t n, int64_t n_rows,
                    int64_t num_buckets, const BucketMap& bucket_of,
                    const ParallelFor& parallel_for) {
  RowGroups out;
  std::vector<Keyed> items(n), scratch;
  for (int64_t i = 0; i < n; ++i) {
    items[i] = {static_cast<uint64_t>(indices[i]), i};
  }
  RadixSort(&items, &scratch, static_cast<uint64_t>(n_rows));

  std::vector<RowGroup> by_row;
  by_row.reserve(n);
  out.positions.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    out.positions[i] = items[i].position;
    const int64_t row = static_cast<int64_t>(items[i].key);
    if (by_row.empty() || by_row.back().row != row) {
      by_row.push_back({row, 0, i, 0});
    }
    ++by_row.back().count;
  }

  constexpr int64_t kHashCycles = 80;
  const int64_t distinct = static_cast<int64_t>(by_row.size());
  items.resize(distinct);
  parallel_for(distinct, kHashCycles, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      by_row[i].bucket = bucket_of(by_row[i].row);
      items[i] = {static_cast<uint64_t>(by_row[i].bucket), i};
    }
  });
  RadixSort(&items, &scratch, static_cast<uint64_t>(num_buckets));

  out.rows.reserve(distinct);
  for (int64_t i = 0; i < distinct; ++i) {
    const RowGroup& group = by_row[items[i].position];
    if (out.rows.empty() || out.rows.back().bucket != group.bucket) {
      out.buckets.push_back(i);
    }
    out.rows.push_back(group);
  }
  out.buckets.push_back(distinct);
  return out;
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_ROW_GROUPS_H_
