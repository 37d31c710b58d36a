// Stable sort of (key, position) pairs by key, least significant digit first.
#ifndef TF_BASIS_CORE_RADIX_SORT_H_
#define TF_BASIS_CORE_RADIX_SORT_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>
#include <vector>

namespace tf_basis {

struct Keyed {
  uint64_t key;
  int64_t position;
};

// Sorts `items` by key; equal keys keep their order. `scratch` is resized.
// Keys must be below `key_limit`.
inline void RadixSort(std::vector<Keyed>* items, std::vector<Keyed>* scratch,
                      uint64_t key_limit) {
  constexpr size_t kSmall = 128;
  if (items->size() <= kSmall) {
    std::stable_sort(
        items->begin(), items->end(),
        [](const Keyed& a, const Keyed& b) { return a.key < b.key; });
    return;
  }
  constexpr int kDigitBits = 11;
  constexpr uint64_t kDigitMask = (uint64_t{1} << kDigitBits) - 1;
  scratch->resize(items->size());
  int shift = 0;
  for (uint64_t rest = key_limit - 1; rest > 0; rest >>= kDigitBits) {
    std::array<size_t, kDigitMask + 1> offsets{};
    for (const Keyed& item : *items)
      ++offsets[(item.key >> shift) & kDigitMask];
    size_t total = 0;
    for (size_t& offset : offsets) total += std::exchange(offset, total);
    for (const Keyed& item : *items) {
      (*scratch)[offsets[(item.key >> shift) & kDigitMask]++] = item;
    }
    items->swap(*scratch);
    shift += kDigitBits;
  }
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_RADIX_SORT_H_
