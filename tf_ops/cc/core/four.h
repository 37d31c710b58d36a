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

// Bit i of the result: element i of the 16 of the masks.
inline unsigned Bits16(const Int4* masks) {
#if defined(__SSE2__)
  const auto m = [masks](int i) { return reinterpret_cast<__m128i>(masks[i]); };
  return _mm_movemask_epi8(_mm_packs_epi16(_mm_packs_epi32(m(0), m(1)),
                                           _mm_packs_epi32(m(2), m(3))));
#else
  unsigned bits = 0;
  for (int j = 0; j < 4; ++j) {
    const Int4 m = masks[j] & Int4{1, 2, 4, 8};
    bits |= static_cast<unsigned>(m[0] | m[1] | m[2] | m[3]) << (4 * j);
  }
  return bits;
#endif
}

// Puts a 0 bit above each of 16 bits.
inline uint32_t Spread16(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ffu;
  x = (x | x << 4) & 0x0f0f0f0fu;
  x = (x | x << 2) & 0x33333333u;
  return (x | x << 1) & 0x55555555u;
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_FOUR_H_
