// Row ids and mappings of any kind: what passes the checks stays in range.
#ifndef TF_BASIS_TESTS_CC_EXERCISE_MAPPING_H_
#define TF_BASIS_TESTS_CC_EXERCISE_MAPPING_H_

#include <vector>

#include "core/mapping_check.h"
#include "core/row_groups.h"
#include "source.h"

namespace tf_basis {
namespace exercise {

// A mapping and the memory of its owners.
struct Mapping {
  RowMapping rows;
  std::vector<int64_t> owner_rows, owner_buckets;
};

inline int64_t Size(Source* source) {
  switch (source->Below(4)) {
    case 0:
      return 1 + source->Below(20);
    case 1:
      return source->Raw<int64_t>();
    default:
      return source->Below(int64_t{1} << (1 + source->Below(62)));
  }
}

// Sizes without rhyme or reason.
inline void AnyMapping(Source* source, Mapping* out) {
  RowMapping& rows = out->rows;
  rows.n_rows = Size(source);
  rows.num_buckets = source->Flip() ? Size(source) : rows.n_rows / 2;
  rows.exclusive_rows = source->Flip() ? 0 : Size(source);
  rows.hashing = static_cast<Hashing>(source->Below(4));
  rows.seed = source->Raw<uint32_t>();
  for (int64_t i = source->Below(4); i > 0; --i) {
    rows.domains.push_back(Size(source));
  }
  if (!rows.domains.empty() && source->Flip()) {
    rows.domains.back() = static_cast<int64_t>(
        static_cast<uint64_t>(rows.n_rows) - rows.exclusive_rows);
  }
  const bool listed = rows.exclusive_rows >= 0 && rows.exclusive_rows < 64;
  for (int64_t i = 0; listed && i < rows.exclusive_rows; ++i) {
    out->owner_rows.push_back(source->Flip() ? 2 * i : Size(source));
    out->owner_buckets.push_back(source->Flip() ? i : Size(source));
  }
}

// A mapping of a table of a few rows.
inline void SmallMapping(Source* source, int64_t n_rows, Mapping* out) {
  RowMapping& rows = out->rows;
  rows.n_rows = n_rows;
  rows.num_buckets = 1 + source->Below(n_rows);
  rows.exclusive_rows = source->Flip() ? 0 : source->Below(rows.num_buckets);
  rows.hashing = static_cast<Hashing>(source->Below(4));
  rows.seed = source->Raw<uint32_t>();
  const int64_t hashed = n_rows - rows.owners();
  if (hashed > 1 && source->Flip()) {
    rows.domains = {1 + source->Below(hashed - 1), hashed};
  }
  if (rows.num_buckets == n_rows || source->Flip()) return;
  const int64_t step = n_rows / std::max<int64_t>(rows.exclusive_rows, 1);
  for (int64_t i = 0; i < rows.exclusive_rows; ++i) {
    out->owner_rows.push_back(i * step);
    out->owner_buckets.push_back(rows.exclusive_rows - 1 - i);
  }
  if (rows.exclusive_rows == 0) return;
  rows.owner_rows = out->owner_rows.data();
  rows.owner_buckets = out->owner_buckets.data();
}

inline void ExerciseMapping(Source* source) {
  Mapping mapping;
  AnyMapping(source, &mapping);
  RowMapping& rows = mapping.rows;
  if (!SizesError(rows).empty()) return;
  if (!mapping.owner_rows.empty() && rows.num_buckets < rows.n_rows) {
    rows.owner_rows = mapping.owner_rows.data();
    rows.owner_buckets = mapping.owner_buckets.data();
    if (!OwnersError(rows).empty()) return;
  }
  const BucketMap buckets_of(rows);
  std::vector<int64_t> ids = {0, rows.n_rows - 1, rows.n_rows / 2};
  while (ids.size() < 40) ids.push_back(source->Below(rows.n_rows));
  for (const int64_t row : ids) {
    int64_t buckets[2] = {-1, -1};
    const int count = buckets_of(row, buckets);
    CHECK(count == 1 || (count == 2 && buckets[0] != buckets[1]));
    for (int k = 0; k < count; ++k) {
      CHECK(buckets[k] >= 0 && buckets[k] < rows.num_buckets);
    }
  }
  const RowGroups groups =
      GroupRows(ids.data(), static_cast<int64_t>(ids.size()), rows.n_rows,
                rows.num_buckets, buckets_of, Serial());
  int64_t members = 0;
  for (size_t i = 0; i < groups.buckets.size(); ++i) {
    members += groups.buckets[i].count;
    CHECK(i == 0 || groups.buckets[i - 1].bucket < groups.buckets[i].bucket);
  }
  CHECK(members == static_cast<int64_t>(groups.members.size()));
  for (size_t i = 1; i < groups.rows.size(); ++i) {
    CHECK(groups.rows[i - 1].row < groups.rows[i].row);
  }
}

}  // namespace exercise
}  // namespace tf_basis

#endif  // TF_BASIS_TESTS_CC_EXERCISE_MAPPING_H_
