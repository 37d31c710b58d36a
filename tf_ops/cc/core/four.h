// Four floats at once, in the registers that every machine has: the bits are
// the same everywhere, and no loop waits for the compiler to find them.
#ifndef TF_BASIS_CORE_FOUR_H_
#define TF_BASIS_CORE_FOUR_H_

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tf_basis {

typedef float Float4 __attribute__((vector_size(16)));
typedef int32_t Int4 __attribute__((vector_size(16)));  // of masks: 0 or -1
typedef double Double2 __attribute__((vector_size(16)));

inline Float4 Load4(const float* x) {
  Float4 four;
  std::memcpy(&four, x, sizeof(four));
  return four;
}

inline void Store4(Float4 four, float* x) {
  std::memcpy(x, &four, sizeof(four));
}

inline Float4 All4(float x) { return Float4{x, x, x, x}; }

inline Float4 Abs4(Float4 x) {
  return reinterpret_cast<Float4>(reinterpret_cast<Int4>(x) & 0x7fffffff);
}

// x where the mask is set, else 0.
inline Float4 Keep4(Int4 mask, Float4 x) {
  return reinterpret_cast<Float4>(mask & reinterpret_cast<Int4>(x));
}

// x where the mask is set, else y.
inline Float4 Choose4(Int4 mask, Float4 x, Float4 y) {
  return reinterpret_cast<Float4>((mask & reinterpret_cast<Int4>(x)) |
                                  (~mask & reinterpret_cast<Int4>(y)));
}

// -x where the mask is set, else x.
inline Float4 Negate4(Int4 mask, Float4 x) {
  return reinterpret_cast<Float4>((mask << 31) ^ reinterpret_cast<Int4>(x));
}

// Adds four numbers to four sums.
inline void AddTo(Double2* sums, Float4 x) {
#if defined(__SSE2__)
  sums[0] += _mm_cvtps_pd(x);
  sums[1] += _mm_cvtps_pd(_mm_movehl_ps(x, x));
#else
  sums[0] += Double2{x[0], x[1]};
  sums[1] += Double2{x[2], x[3]};
#endif
}

#if defined(__SSE2__)
// The 16 masks as bytes.
inline __m128i Bytes16(const Int4* masks) {
  const auto m = [masks](int i) { return reinterpret_cast<__m128i>(masks[i]); };
  return _mm_packs_epi16(_mm_packs_epi32(m(0), m(1)),
                         _mm_packs_epi32(m(2), m(3)));
}
#else
// `step` bits for each of the 16 masks, of which the lowest is set or not.
inline uint32_t SpreadBits(const Int4* masks, int step) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) {
    bits |= static_cast<uint32_t>(masks[i / 4][i % 4] & 1) << (i * step);
  }
  return bits;
}
#endif

// Bit i of the result: mask i of 16.
inline uint32_t Bits16(const Int4* masks) {
#if defined(__SSE2__)
  return _mm_movemask_epi8(Bytes16(masks));
#else
  return SpreadBits(masks, 1);
#endif
}

// Bits 2 * i and 2 * i + 1 of the result: mask i of `low` and of `high`.
inline uint32_t Bits32(const Int4* low, const Int4* high) {
#if defined(__SSE2__)
  const __m128i l = Bytes16(low), h = Bytes16(high);
  const uint32_t first = _mm_movemask_epi8(_mm_unpacklo_epi8(l, h));
  const uint32_t last = _mm_movemask_epi8(_mm_unpackhi_epi8(l, h));
  return first | last << 16;
#else
  return SpreadBits(low, 2) | SpreadBits(high, 2) << 1;
#endif
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_FOUR_H_
