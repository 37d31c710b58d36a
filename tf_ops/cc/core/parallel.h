// How the algorithms of core/ reach threads without knowing whose they are.
#ifndef TF_BASIS_CORE_PARALLEL_H_
#define TF_BASIS_CORE_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace tf_basis {

// Calls work(begin, end) over disjoint ranges that cover [0, total), perhaps
// concurrently, and returns when all are done. `cost` is in cycles per unit.
using ParallelFor =
    std::function<void(int64_t total, int64_t cost,
                       const std::function<void(int64_t, int64_t)>& work)>;

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_PARALLEL_H_
