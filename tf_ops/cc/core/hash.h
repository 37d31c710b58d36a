// Row -> bucket. Format version 1: a saved table depends on these functions, so
// they never change silently. tf_basis/hashing.py is the pure-TensorFlow twin.
#ifndef TF_BASIS_CORE_HASH_H_
#define TF_BASIS_CORE_HASH_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tf_basis {

// The finaliser of MurmurHash3_x86_32.
inline uint32_t Fmix32(uint32_t h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return h;
}

inline uint32_t RotateLeft32(uint32_t x, int bits) {
  return (x << bits) | (x >> (32 - bits));
}

// MurmurHash3_x86_32 of `id` as the 8 little-endian bytes of an int64.
inline uint32_t Murmur3(int64_t id, uint32_t seed) {
  const uint64_t bits = static_cast<uint64_t>(id);
  uint32_t h = seed;
  for (int word = 0; word < 2; ++word) {
    uint32_t k = static_cast<uint32_t>(bits >> (32 * word));
    k *= 0xcc9e2d51u;
    k = RotateLeft32(k, 15);
    k *= 0x1b873593u;
    h ^= k;
    h = RotateLeft32(h, 13);
    h = h * 5 + 0xe6546b64u;
  }
  return Fmix32(h ^ 8u);
}

// A keyed bijection of [0, size): an unbalanced Feistel network over the next
// power of two, walked until it lands inside.
class BalancedPermutation {
 public:
  static constexpr int kRounds = 6;

  BalancedPermutation(int64_t size, uint32_t seed)
      : size_(static_cast<uint64_t>(size)) {
    int bits = 0;
    for (uint64_t top = size_ > 0 ? size_ - 1 : 0; top > 0; top >>= 1) ++bits;
    if (bits < 2) bits = 2;
    low_bits_ = bits / 2;
    low_mask_ = (uint64_t{1} << low_bits_) - 1;
    high_mask_ = (uint64_t{1} << (bits - low_bits_)) - 1;
    for (int i = 0; i < kRounds; ++i) keys_[i] = Murmur3(i, seed);
  }

  // `x` in [0, size).
  uint64_t operator()(uint64_t x) const {
    if (size_ <= 1) return 0;
    do {
      uint64_t low = x & low_mask_;
      uint64_t high = x >> low_bits_;
      for (int i = 0; i < kRounds; i += 2) {
        high ^= Fmix32(static_cast<uint32_t>(low) ^ keys_[i]) & high_mask_;
        low ^= Fmix32(static_cast<uint32_t>(high) ^ keys_[i + 1]) & low_mask_;
      }
      x = (high << low_bits_) | low;
    } while (x >= size_);
    return x;
  }

 private:
  uint64_t size_;
  int low_bits_;
  uint64_t low_mask_;
  uint64_t high_mask_;
  uint32_t keys_[kRounds];
};

// Jump consistent hash: when `buckets` grows, the fewest keys move, and only to
// new buckets. Lamping and Veach, "A Fast, Minimal Memory, Consistent Hash
// Algorithm", 2014.
inline int64_t JumpHash(uint64_t key, int64_t buckets) {
  int64_t bucket = -1, next = 0;
  while (next < buckets) {
    bucket = next;
    key = key * 2862933555777941757ull + 1;
    const double jump = static_cast<double>(bucket + 1) *
                        (static_cast<double>(int64_t{1} << 31) /
                         static_cast<double>((key >> 33) + 1));
    if (jump >= 0x1p63) break;  // no int64: past the last bucket of any table
    next = static_cast<int64_t>(jump);
  }
  return bucket;
}

enum class Hashing { kBalanced, kMurmur3, kDouble, kConsistent };

// What decides the buckets of a row; see tf_basis.ops.hash_ops.RowMapping.
struct RowMapping {
  int64_t n_rows;
  int64_t num_buckets;     // at most n_rows
  int64_t exclusive_rows;  // K: as many rows own a bucket each
  Hashing hashing;
  uint32_t seed;
  // The owners, ascending, and their buckets; null: row r < K owns bucket r.
  const int64_t* owner_rows = nullptr;
  const int64_t* owner_buckets = nullptr;
  // Ends of the ranges of hashed rows that were added together; the last one is
  // n_rows - K. Rows added later are hashed among themselves, so that older
  // rows keep their buckets.
  std::vector<int64_t> domains;

  int64_t owners() const {
    return num_buckets >= n_rows ? n_rows : exclusive_rows;
  }
};

// The buckets of a row of one table: one, or two in the double mode.
class BucketMap {
 public:
  explicit BucketMap(const RowMapping& mapping)
      : mapping_(mapping),
        owners_(mapping.owners()),
        shared_(static_cast<uint64_t>(mapping.num_buckets - owners_)),
        power_of_two_(shared_ > 0 && (shared_ & (shared_ - 1)) == 0),
        second_seed_(mapping.seed + 0x9e3779b9u) {
    if (mapping_.hashing != Hashing::kBalanced) return;
    std::vector<int64_t> ends = mapping.domains;
    if (ends.empty()) ends.push_back(mapping.n_rows - owners_);
    int64_t begin = 0;
    for (int64_t end : ends) {
      domains_.push_back({begin, end, {end - begin, mapping.seed}});
      begin = end;
    }
  }

  // Buckets below this belong to one row each.
  int64_t owners() const { return owners_; }

  // Writes the buckets of `row` (in [0, n_rows)); returns how many differ.
  int operator()(int64_t row, int64_t out[2]) const {
    int64_t rank = row - owners_;  // among the rows that own no bucket
    if (owners_ == mapping_.n_rows) {
      out[0] = row;
      return 1;
    }
    if (mapping_.owner_rows == nullptr) {
      if (rank < 0) {
        out[0] = row;
        return 1;
      }
    } else {
      const int64_t* end = mapping_.owner_rows + owners_;
      const int64_t* found = std::lower_bound(mapping_.owner_rows, end, row);
      const int64_t below = found - mapping_.owner_rows;
      if (found != end && *found == row) {
        out[0] = mapping_.owner_buckets[below];
        return 1;
      }
      rank = row - below;
    }
    switch (mapping_.hashing) {
      case Hashing::kBalanced:
        out[0] = Slot(Permute(rank));
        return 1;
      case Hashing::kMurmur3:
        out[0] = Slot(Murmur3(row, mapping_.seed));
        return 1;
      case Hashing::kDouble:
        out[0] = Slot(Murmur3(row, mapping_.seed));
        out[1] = Slot(Murmur3(row, second_seed_));
        return out[0] == out[1] ? 1 : 2;
      case Hashing::kConsistent:
        break;
    }
    out[0] = owners_ + JumpHash((uint64_t{Murmur3(row, mapping_.seed)} << 32) |
                                    Murmur3(row, second_seed_),
                                static_cast<int64_t>(shared_));
    return 1;
  }

 private:
  struct Domain {
    int64_t begin, end;
    BalancedPermutation permutation;
  };

  uint64_t Permute(int64_t rank) const {
    size_t i = 0;
    while (rank >= domains_[i].end) ++i;
    return domains_[i].permutation(
        static_cast<uint64_t>(rank - domains_[i].begin));
  }

  int64_t Slot(uint64_t h) const {
    const uint64_t slot = power_of_two_ ? (h & (shared_ - 1)) : (h % shared_);
    return owners_ + static_cast<int64_t>(slot);
  }

  const RowMapping& mapping_;
  int64_t owners_;
  uint64_t shared_;
  bool power_of_two_;
  uint32_t second_seed_;
  std::vector<Domain> domains_;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_HASH_H_
