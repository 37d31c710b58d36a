// Orders a batch of row ids: distinct rows ascending, duplicates in batch
// order, and the rows of each bucket together. Everything that follows depends
// on this order alone, which is why a step does not depend on the number of
// threads.
#ifndef TF_BASIS_CORE_ROW_GROUPS_H_
#define TF_BASIS_CORE_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "core/hash.h"
#include "core/parallel.h"
#include "core/radix_sort.h"

namespace tf_basis {

struct TouchedRow {
  int64_t row;
  int64_t first;  // its gradients are positions[first .. first + count)
  int64_t count;
  int num_buckets;
  int64_t buckets[2];
};

struct TouchedBucket {
  int64_t bucket;
  int64_t first;  // its rows are members[first .. first + count), ascending
  int64_t count;
};

struct RowGroups {
  std::vector<int64_t> positions;  // in the batch
  std::vector<TouchedRow> rows;
  std::vector<int64_t> members;  // indices into `rows`
  std::vector<TouchedBucket> buckets;
};

// `indices[i]` in [0, n_rows) for i < n.
template <typename Index>
RowGroups GroupRows(const Index* indices, int64_t n, int64_t n_rows,
                    int64_t num_buckets, const BucketMap& buckets_of,
                    const ParallelFor& parallel_for) {
  RowGroups out;
  std::vector<Keyed> items(n), scratch;
  for (int64_t i = 0; i < n; ++i) {
    items[i] = {static_cast<uint64_t>(indices[i]), i};
  }
  RadixSort(&items, &scratch, static_cast<uint64_t>(n_rows));

  out.rows.reserve(n);
  out.positions.resize(n);
  for (int64_t i = 0; i < n; ++i) {
    out.positions[i] = items[i].position;
    const int64_t row = static_cast<int64_t>(items[i].key);
    if (out.rows.empty() || out.rows.back().row != row) {
      out.rows.push_back({row, i, 0, 0, {0, 0}});
    }
    ++out.rows.back().count;
  }

  constexpr int64_t kHashCycles = 80;
  const int64_t distinct = static_cast<int64_t>(out.rows.size());
  parallel_for(distinct, kHashCycles, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      TouchedRow& row = out.rows[i];
      row.num_buckets = buckets_of(row.row, row.buckets);
    }
  });
  items.clear();
  for (int64_t i = 0; i < distinct; ++i) {
    const TouchedRow& row = out.rows[i];
    for (int k = 0; k < row.num_buckets; ++k) {
      items.push_back({static_cast<uint64_t>(row.buckets[k]), i});
    }
  }
  RadixSort(&items, &scratch, static_cast<uint64_t>(num_buckets));

  out.members.resize(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const int64_t bucket = static_cast<int64_t>(items[i].key);
    out.members[i] = items[i].position;
    if (out.buckets.empty() || out.buckets.back().bucket != bucket) {
      out.buckets.push_back({bucket, static_cast<int64_t>(i), 0});
    }
    ++out.buckets.back().count;
  }
  return out;
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_ROW_GROUPS_H_
