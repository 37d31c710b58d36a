// Codes of 1 or 2 bits an element: packed into bytes, and read again.
//
// Elements are worked on in groups of 16. A group that is not full is given
// zeros for the missing elements; whoever packs it drops their codes.
#ifndef TF_BASIS_CORE_BLOCK_CODES_H_
#define TF_BASIS_CORE_BLOCK_CODES_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/four.h"

namespace tf_basis {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "messages are little-endian and are copied as they are");

constexpr int64_t kGroup = 16;
constexpr int kFours = kGroup / 4;

// The codes of a group as an integer of kBits * 2 bytes.
template <int kBits>
using Codes = std::conditional_t<kBits == 1, uint16_t, uint32_t>;

// The scales of a block. 1 bit: `low` alone. 2 bits: of elements of magnitudes
// below `threshold`, and of the others.
struct BlockScales {
  float low = 0, high = 0, threshold = 0;
};

template <int kBits>
BlockScales LoadScales(const uint8_t* in) {
  BlockScales scales;
  std::memcpy(&scales.low, in, sizeof(float));
  if (kBits == 2) std::memcpy(&scales.high, in + 4, sizeof(float));
  return scales;
}

template <int kBits>
void StoreScales(const BlockScales& scales, uint8_t* out) {
  std::memcpy(out, &scales.low, sizeof(float));
  if (kBits == 2) std::memcpy(out + 4, &scales.high, sizeof(float));
}

// u <- u - q for a group; returns its codes.
template <int kBits>
Codes<kBits> EncodeGroup(const BlockScales& scales, float* u) {
  Int4 positive[kFours], large[kFours] = {};
  for (int j = 0; j < kFours; ++j) {
    const Float4 x = Load4(u + 4 * j);
    Float4 scale = All4(scales.low);
    positive[j] = x >= All4(0.0f);
    if (kBits == 2) {
      large[j] = Abs4(x) >= All4(scales.threshold);
      scale = Choose4(large[j], All4(scales.high), scale);
    }
    Store4(x - Negate4(~positive[j], scale), u + 4 * j);
  }
  return static_cast<Codes<kBits>>(kBits == 1 ? Bits16(positive)
                                              : Bits32(positive, large));
}

// What the codes of a group stand for.
template <int kBits>
void DecodeGroup(Codes<kBits> codes, const BlockScales& scales, Float4* q) {
  const int32_t word = static_cast<int32_t>(codes);
  const Int4 words = {word, word, word, word};
  for (int j = 0; j < kFours; ++j) {
    // Element k of these four has its bits at (4 * j + k) * kBits.
    constexpr int32_t kStep = 1 << kBits;
    const Int4 sign_bit = Int4{1, kStep, kStep * kStep, kStep * kStep * kStep}
                          << (4 * j * kBits);
    Float4 scale = All4(scales.low);
    if (kBits == 2) {
      const Int4 small = (words & (sign_bit << 1)) == 0;
      scale = Choose4(small, scale, All4(scales.high));
    }
    q[j] = Negate4((words & sign_bit) == 0, scale);
  }
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BLOCK_CODES_H_
