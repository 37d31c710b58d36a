// What a mapping of rows must hold before any row is looked up in it: every
// bucket is in range then, whatever the row.
#ifndef TF_BASIS_CORE_MAPPING_CHECK_H_
#define TF_BASIS_CORE_MAPPING_CHECK_H_

#include <cstdint>
#include <string>

#include "core/hash.h"

namespace tf_basis {

// What is wrong with the sizes and the domains, or nothing.
inline std::string SizesError(const RowMapping& mapping) {
  const int64_t n_rows = mapping.n_rows, num_buckets = mapping.num_buckets;
  const int64_t exclusive = mapping.exclusive_rows;
  const auto text = [](int64_t number) { return std::to_string(number); };
  if (n_rows < 1 || num_buckets < 1 || num_buckets > n_rows || exclusive < 0 ||
      (num_buckets < n_rows && exclusive >= num_buckets)) {
    return "exclusive_rows < num_buckets <= n_rows must hold, received " +
           text(exclusive) + ", " + text(num_buckets) + " and " + text(n_rows);
  }
  int64_t last = 0;
  for (const int64_t end : mapping.domains) {
    if (end <= last) {
      return "domains must ascend from above 0, received " + text(end) +
             " after " + text(last);
    }
    last = end;
  }
  const int64_t hashed = n_rows - mapping.owners();
  if (!mapping.domains.empty() && last != hashed) {
    return "domains must end at the " + text(hashed) +
           " hashed rows, received " + text(last);
  }
  return "";
}

// What is wrong with the lists of owners, or nothing.
inline std::string OwnersError(const RowMapping& mapping) {
  for (int64_t i = 0; i < mapping.exclusive_rows; ++i) {
    const int64_t row = mapping.owner_rows[i];
    const int64_t bucket = mapping.owner_buckets[i];
    if (row < 0 || row >= mapping.n_rows || bucket < 0 ||
        bucket >= mapping.exclusive_rows ||
        (i > 0 && row <= mapping.owner_rows[i - 1])) {
      return "owner_rows must be ascending rows and owner_buckets below "
             "exclusive_rows, received row " +
             std::to_string(row) + " with bucket " + std::to_string(bucket);
    }
  }
  return "";
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_MAPPING_CHECK_H_
