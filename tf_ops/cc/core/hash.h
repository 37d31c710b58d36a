// Row -> bucket. Format version 1: a saved table depends on these functions, so
// they never change silently. tf_basis/hashing.py is the pure-TensorFlow twin.
#ifndef TF_BASIS_CORE_HASH_H_
#define TF_BASIS_CORE_HASH_H_

#include <cstdint>

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

enum class Hashing { kBalanced, kMurmur3 };

// The bucket of a row of one table. The first `exclusive_rows` rows own the
// bucket of their own number; with at least as many buckets as rows all do.
class BucketMap {
 public:
  BucketMap(int64_t n_rows, int64_t num_buckets, int64_t exclusive_rows,
            Hashing hashing, uint32_t seed)
      : owners_(num_buckets >= n_rows ? n_rows : exclusive_rows),
        shared_(static_cast<uint64_t>(num_buckets - owners_)),
        mask_(shared_ > 0 && (shared_ & (shared_ - 1)) == 0 ? shared_ - 1 : 0),
        power_of_two_(mask_ > 0 || shared_ == 1),
        hashing_(hashing),
        seed_(seed),
        permutation_(n_rows - owners_, seed) {}

  // Rows below this own the bucket of the same number and share it with nobody.
  int64_t owners() const { return owners_; }

  // `row` in [0, n_rows).
  int64_t operator()(int64_t row) const {
    if (row < owners_) return row;
    const uint64_t h =
        hashing_ == Hashing::kBalanced
            ? permutation_(static_cast<uint64_t>(row - owners_))
            : static_cast<uint64_t>(Murmur3(row, seed_));
    const uint64_t slot = power_of_two_ ? (h & mask_) : (h % shared_);
    return owners_ + static_cast<int64_t>(slot);
  }

 private:
  int64_t owners_;
  uint64_t shared_;
  uint64_t mask_;
  bool power_of_two_;
  Hashing hashing_;
  uint32_t seed_;
  BalancedPermutation permutation_;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_HASH_H_
