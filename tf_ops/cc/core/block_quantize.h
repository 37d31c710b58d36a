// Quantises vectors block by block, keeping what the bits cannot say.
//
// A message holds, block after block, the scales (little-endian float32, one
// for each bit of an element) and the packed codes; see block_codes.h. Each
// block is worked on by one thread, in one order, so the bits do not depend on
// the number of threads; and it is short enough to stay in the cache between
// the passes over it.
#ifndef TF_BASIS_CORE_BLOCK_QUANTIZE_H_
#define TF_BASIS_CORE_BLOCK_QUANTIZE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/block_codes.h"
#include "core/parallel.h"
#include "core/wide.h"

namespace tf_basis {

// How a vector of `elements` is cut, and where its message holds what.
struct BlockLayout {
  int64_t elements, block;
  int bits;

  int64_t blocks() const { return elements / block + (elements % block != 0); }
  int64_t length(int64_t b) const {
    return std::min(block, elements - b * block);
  }
  int64_t header() const { return 4 * bits; }
  int64_t stride() const { return header() + block / 8 * bits; }
  int64_t message_bytes() const {
    const int64_t rest = elements % block;
    return elements / block * stride() +
           (rest == 0 ? 0 : header() + (rest * bits + 7) / 8);
  }
};

inline void StoreFloat(float x, uint8_t* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  for (int b = 0; b < 4; ++b) out[b] = static_cast<uint8_t>(bits >> (8 * b));
}

inline float LoadFloat(const uint8_t* in) {
  const uint32_t bits = LoadCodes(in, 4);
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

template <int kBits>
BlockScales LoadScales(const uint8_t* in) {
  BlockScales scales;
  scales.low = LoadFloat(in);
  if (kBits == 2) scales.high = LoadFloat(in + 4);
  return scales;
}

// Sums over the elements of a block in float64, in as many lanes as a group has
// elements, added up in one fixed order.
class Lanes {
 public:
  void Add(int64_t lane, float x) { lanes_[lane] += x; }

  double Sum() const {
    double sums[kGroup];
    std::copy_n(lanes_, kGroup, sums);
    for (int64_t half = kGroup / 2; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0];
  }

 private:
  double lanes_[kGroup] = {};
};

inline float Mean(const Lanes& lanes, int64_t count) {
  return count == 0
             ? 0.0f
             : static_cast<float>(lanes.Sum() / static_cast<double>(count));
}

// Calls work(i, lane) for all elements, i = lane modulo kGroup.
template <typename Work>
void ForLanes(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    for (int64_t lane = 0; lane < kGroup; ++lane) work(i + lane, lane);
  }
  for (int64_t lane = 0; i + lane < count; ++lane) work(i + lane, lane);
}

template <int kBits>
BlockScales ScalesOf(const float* u, int64_t count) {
  BlockScales scales;
  Lanes all;
  ForLanes(count,
           [&](int64_t i, int64_t lane) { all.Add(lane, std::fabs(u[i])); });
  scales.low = scales.threshold = Mean(all, count);
  if (kBits == 1) return scales;
  const float threshold = scales.threshold;
  Lanes low, high;
  int32_t large[kGroup] = {};
  ForLanes(count, [&](int64_t i, int64_t lane) {
    const float x = std::fabs(u[i]);
    const bool is_large = x >= threshold;
    high.Add(lane, is_large ? x : 0.0f);
    low.Add(lane, is_large ? 0.0f : x);
    large[lane] += is_large;
  });
  int64_t larges = 0;
  for (int32_t n : large) larges += n;
  scales.low = Mean(low, count - larges);
  scales.high = Mean(high, larges);
  return scales;
}

// Writes the message of a block; u <- u - q.
template <int kBits>
void EncodeBlock(float* u, int64_t count, uint8_t* out) {
  const BlockScales scales = ScalesOf<kBits>(u, count);
  StoreFloat(scales.low, out);
  if (kBits == 2) StoreFloat(scales.high, out + 4);
  out += 4 * kBits;
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    PackGroup<kBits>(u + i, scales, out + i / 8 * kBits);
    for (int64_t k = i; k < i + kGroup; ++k) {
      u[k] -= QuantizedOf<kBits>(u[k], scales);
    }
  }
  PackRest<kBits>(u + i, count - i, scales, out + i / 8 * kBits);
  for (; i < count; ++i) u[i] -= QuantizedOf<kBits>(u[i], scales);
}

// Calls take(i, q) for the first `count` elements of `codes`.
template <int kBits, typename Take>
void Decode(const uint8_t* codes, int64_t count, const BlockScales& scales,
            const Take& take) {
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    UnpackGroup<kBits>(LoadCodes(codes + i / 8 * kBits, kGroup / 8 * kBits),
                       scales, [&](int k, float q) { take(i + k, q); });
  }
  if (i == count) return;
  const int64_t bytes = ((count - i) * kBits + 7) / 8;
  float rest[kGroup];
  UnpackGroup<kBits>(LoadCodes(codes + i / 8 * kBits, bytes), scales,
                     [&](int k, float q) { rest[k] = q; });
  for (int64_t k = 0; i + k < count; ++k) take(i + k, rest[k]);
}

// residual <- u - q for u = values + residual, clipped unless `clip` is 0.
// Returns how many elements were.
template <int kBits>
TF_BASIS_WIDE int64_t QuantizeBlocks(const BlockLayout& layout,
                                     const float* values, float clip,
                                     float* residual, uint8_t* message,
                                     int64_t begin, int64_t end) {
  int64_t clipped = 0;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t count = layout.length(b);
    const float* v = values + b * layout.block;
    float* u = residual + b * layout.block;
    for (int64_t i = 0; i < count; ++i) u[i] += v[i];
    if (clip > 0) {
      for (int64_t i = 0; i < count; ++i) {
        clipped += std::fabs(u[i]) > clip;
        u[i] = u[i] > clip ? clip : u[i] < -clip ? -clip : u[i];
      }
    }
    EncodeBlock<kBits>(u, count, message + b * layout.stride());
  }
  return clipped;
}

// residual <- u - q for u = mean of the workers' q + residual.
template <int kBits>
TF_BASIS_WIDE void AverageBlocks(const BlockLayout& layout,
                                 const uint8_t* messages, int64_t workers,
                                 float* residual, uint8_t* message,
                                 int64_t begin, int64_t end) {
  constexpr int64_t kTile = 512;
  float sums[kTile];
  const int64_t bytes = layout.message_bytes();
  const float divisor = static_cast<float>(workers);
  for (int64_t b = begin; b < end; ++b) {
    const int64_t count = layout.length(b);
    const int64_t start = b * layout.stride();
    float* u = residual + b * layout.block;
    for (int64_t first = 0; first < count; first += kTile) {
      const int64_t length = std::min(kTile, count - first);
      std::fill_n(sums, length, 0.0f);
      for (int64_t w = 0; w < workers; ++w) {
        const uint8_t* in = messages + w * bytes + start;
        Decode<kBits>(in + layout.header() + first / 8 * kBits, length,
                      LoadScales<kBits>(in),
                      [&](int64_t i, float q) { sums[i] += q; });
      }
      for (int64_t i = 0; i < length; ++i) {
        u[first + i] = sums[i] / divisor + u[first + i];
      }
    }
    EncodeBlock<kBits>(u, count, message + start);
  }
}

template <int kBits>
TF_BASIS_WIDE void DequantizeBlocks(const BlockLayout& layout,
                                    const uint8_t* message, float* values,
                                    int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    const uint8_t* in = message + b * layout.stride();
    float* out = values + b * layout.block;
    Decode<kBits>(in + layout.header(), layout.length(b), LoadScales<kBits>(in),
                  [out](int64_t i, float q) { out[i] = q; });
  }
}

// Values that are NaN, infinite or of a magnitude above `limit`.
TF_BASIS_WIDE inline int64_t CountUnusable(const float* values, int64_t count,
                                           float limit) {
  int64_t unusable = 0;
  for (int64_t i = 0; i < count; ++i)
    unusable += !(std::fabs(values[i]) <= limit);
  return unusable;
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BLOCK_QUANTIZE_H_
