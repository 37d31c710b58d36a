// Codes of 1 or 2 bits an element: packed into bytes, and read again.
#ifndef TF_BASIS_CORE_BLOCK_CODES_H_
#define TF_BASIS_CORE_BLOCK_CODES_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tf_basis {

// What is done at once: the codes of a group fill kBits * 2 bytes.
constexpr int64_t kGroup = 16;

// The scales of a block. 1 bit: `low` alone. 2 bits: of elements of magnitudes
// below `threshold`, and of the others.
struct BlockScales {
  float low = 0, high = 0, threshold = 0;
};

template <int kBits>
float QuantizedOf(float u, const BlockScales& scales) {
  const float scale =
      kBits == 1 || std::fabs(u) < scales.threshold ? scales.low : scales.high;
  return u >= 0 ? scale : -scale;
}

template <int kBits>
unsigned CodeOf(float u, const BlockScales& scales) {
  const unsigned positive = u >= 0;
  if (kBits == 1) return positive;
  return positive | (std::fabs(u) >= scales.threshold ? 2u : 0u);
}

#if defined(__SSE2__)
// Bytes of a group: 255 where the element, without the bits of `drop`, is at
// least `bound`.
inline __m128i AtLeast(const float* u, __m128 bound, __m128 drop) {
  const auto four = [&](int i) {
    const __m128 x = _mm_andnot_ps(drop, _mm_loadu_ps(u + 4 * i));
    return _mm_castps_si128(_mm_cmpge_ps(x, bound));
  };
  return _mm_packs_epi16(_mm_packs_epi32(four(0), four(1)),
                         _mm_packs_epi32(four(2), four(3)));
}
#endif

// Packs the codes of kGroup elements.
template <int kBits>
void PackGroup(const float* u, const BlockScales& scales, uint8_t* out) {
#if defined(__SSE2__)
  const __m128i positive = AtLeast(u, _mm_setzero_ps(), _mm_setzero_ps());
  if (kBits == 1) {
    const uint16_t codes = static_cast<uint16_t>(_mm_movemask_epi8(positive));
    std::memcpy(out, &codes, sizeof(codes));
    return;
  }
  const __m128i large =
      AtLeast(u, _mm_set1_ps(scales.threshold), _mm_set1_ps(-0.0f));
  const unsigned first = _mm_movemask_epi8(_mm_unpacklo_epi8(positive, large));
  const unsigned last = _mm_movemask_epi8(_mm_unpackhi_epi8(positive, large));
  const uint32_t codes = first | last << 16;
  std::memcpy(out, &codes, sizeof(codes));
#else
  constexpr int kPerByte = 8 / kBits;
  for (int64_t b = 0; b < kGroup / kPerByte; ++b) {
    unsigned byte = 0;
    for (int k = 0; k < kPerByte; ++k) {
      byte |= CodeOf<kBits>(u[b * kPerByte + k], scales) << (k * kBits);
    }
    out[b] = static_cast<uint8_t>(byte);
  }
#endif
}

// Packs the codes of fewer than kGroup elements; bits past the end are 0.
template <int kBits>
void PackRest(const float* u, int64_t count, const BlockScales& scales,
              uint8_t* out) {
  uint32_t codes = 0;
  for (int64_t k = 0; k < count; ++k) {
    codes |= CodeOf<kBits>(u[k], scales) << (k * kBits);
  }
  for (int64_t b = 0; b < (count * kBits + 7) / 8; ++b) {
    out[b] = static_cast<uint8_t>(codes >> (8 * b));
  }
}

// The codes of up to kGroup elements, from `bytes` bytes.
inline uint32_t LoadCodes(const uint8_t* in, int64_t bytes) {
  uint32_t codes = 0;
  for (int64_t b = 0; b < bytes; ++b) {
    codes |= static_cast<uint32_t>(in[b]) << (8 * b);
  }
  return codes;
}

// Calls take(k, q) for the kGroup elements of `codes`. Masks and selections
// only, so that the compiler can do several at once.
template <int kBits, typename Take>
void UnpackGroup(uint32_t codes, const BlockScales& scales, const Take& take) {
  uint32_t low, high;
  std::memcpy(&low, &scales.low, sizeof(low));
  std::memcpy(&high, &scales.high, sizeof(high));
  for (int k = 0; k < kGroup; ++k) {
    const uint32_t positive = codes & (1u << (k * kBits));
    const uint32_t large = kBits == 1 ? 0 : codes & (2u << (k * kBits));
    const uint32_t bits =
        (large == 0 ? low : high) ^ (positive == 0 ? 0x80000000u : 0u);
    float q;
    std::memcpy(&q, &bits, sizeof(q));
    take(k, q);
  }
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BLOCK_CODES_H_
