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
#include <vector>

#include "core/block_codes.h"
#include "core/four.h"
#include "core/pieces.h"
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

// Sums over the elements of a block in float64, in as many lanes as a group has
// elements, added up in one fixed order.
class Lanes {
 public:
  void AddGroup(const Float4* x) {
    for (int j = 0; j < kFours; ++j) AddTo(lanes_ + 2 * j, x[j]);
  }

  double Sum() const {
    Double2 sums[kGroup / 2];
    std::copy_n(lanes_, kGroup / 2, sums);
    for (int64_t half = kGroup / 4; half > 0; half /= 2) {
      for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    return sums[0][0] + sums[0][1];
  }

 private:
  Double2 lanes_[kGroup / 2] = {};
};

inline float Mean(double sum, int64_t count) {
  return count == 0 ? 0.0f
                    : static_cast<float>(sum / static_cast<double>(count));
}

// A group of fewer elements, with zeros for the missing ones.
inline const float* Padded(const float* x, int64_t count, float* group) {
  std::fill(std::copy_n(x, count, group), group + kGroup, 0.0f);
  return group;
}

// Calls work(i, x) for each group, x[0..16) being elements i to i + 16. Missing
// elements are zeros, and what is written to them is lost.
template <typename Work>
void ForGroups(float* x, int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) work(i, x + i);
  if (i == count) return;
  float rest[kGroup];
  Padded(x + i, count - i, rest);
  work(i, rest);
  std::copy_n(rest, count - i, x + i);
}

// The scales of a block whose magnitudes have the sum `total`.
template <int kBits>
BlockScales ScalesOf(float* u, int64_t count, double total) {
  BlockScales scales;
  scales.low = scales.threshold = Mean(total, count);
  if (kBits == 1) return scales;
  const Float4 threshold = All4(scales.threshold);
  Lanes low;
  Int4 smalls = {};
  ForGroups(u, count, [&](int64_t, const float* x) {
    Float4 kept[kFours];
    for (int j = 0; j < kFours; ++j) {
      const Float4 magnitude = Abs4(Load4(x + 4 * j));
      const Int4 large = magnitude >= threshold;
      kept[j] = Keep4(~large, magnitude);
      smalls += large + 1;
    }
    low.AddGroup(kept);
  });
  // Missing elements, too, are small, unless the threshold is 0.
  const int64_t missing = scales.threshold > 0 ? -count & (kGroup - 1) : 0;
  int64_t small = -missing;
  for (int k = 0; k < 4; ++k) small += smalls[k];
  scales.low = Mean(low.Sum(), small);
  // The large ones are at least small / count of the total: nothing cancels.
  scales.high = Mean(total - low.Sum(), count - small);
  return scales;
}

// Scales that are known beforehand; magnitudes take the nearer one.
template <int kBits>
BlockScales GivenScales(const float* given) {
  BlockScales scales;
  scales.low = given[0];
  if (kBits == 2) {
    scales.high = given[1];
    scales.threshold = 0.5f * (given[0] + given[1]);
  }
  return scales;
}

// Writes the message of a block; u <- u - q. `fill(i, x)` first brings a group
// to x, which holds what u held; what it makes of missing elements is dropped.
// The scales are those `given`, or those of u where that is null.
template <int kBits, typename Fill>
void EncodeBlock(float* u, int64_t count, const float* given, uint8_t* out,
                 const Fill& fill) {
  Lanes total;
  ForGroups(u, count, [&](int64_t i, float* x) {
    Float4 four[kFours];
    for (int j = 0; j < kFours; ++j) four[j] = Load4(x + 4 * j);
    fill(i, four);
    for (int j = 0; j < kFours; ++j) Store4(four[j], x + 4 * j);
    if (i + kGroup > count) std::fill(x + (count - i), x + kGroup, 0.0f);
    for (int j = 0; j < kFours; ++j) four[j] = Abs4(Load4(x + 4 * j));
    total.AddGroup(four);
  });
  const BlockScales scales = given == nullptr
                                 ? ScalesOf<kBits>(u, count, total.Sum())
                                 : GivenScales<kBits>(given);
  StoreScales<kBits>(scales, out);
  out += 4 * kBits;
  ForGroups(u, count, [&](int64_t i, float* x) {
    Codes<kBits> codes = EncodeGroup<kBits>(scales, x);
    const int64_t length = std::min(kGroup, count - i);
    if (length == kGroup) {
      std::memcpy(out + i / 8 * kBits, &codes, sizeof(codes));
    } else {
      codes &= (uint64_t{1} << (length * kBits)) - 1;
      std::memcpy(out + i / 8 * kBits, &codes, (length * kBits + 7) / 8);
    }
  });
}

// The codes from bit `i` * kBits on of a block of `count` elements.
template <int kBits>
Codes<kBits> LoadCodes(const uint8_t* codes, int64_t i, int64_t count) {
  Codes<kBits> loaded = 0;
  if (i + kGroup <= count) {
    std::memcpy(&loaded, codes + i / 8 * kBits, sizeof(loaded));
  } else {
    std::memcpy(&loaded, codes + i / 8 * kBits, ((count - i) * kBits + 7) / 8);
  }
  return loaded;
}

// What is quantised: values, or a momentum that has taken them up,
// keep * momentum + take * values.
struct Intake {
  Pieces values;
  const float* momentum = nullptr;
  float keep = 0, take = 1;
};

// residual <- u - q for u = intake + residual, clipped unless `clip` is 0.
// Returns how many elements were. `given` are the scales of all blocks, or
// null.
template <int kBits, bool kMomentum>
TF_BASIS_WIDE int64_t QuantizeBlocks(const BlockLayout& layout,
                                     const Intake& intake, float clip,
                                     const float* given, float* residual,
                                     uint8_t* message, int64_t begin,
                                     int64_t end) {
  int64_t clipped = 0;
  std::vector<float> scratch;
  const Float4 limit = All4(clip > 0 ? clip : INFINITY);
  const Float4 keep = All4(intake.keep), take = All4(intake.take);
  for (int64_t b = begin; b < end; ++b) {
    const int64_t count = layout.length(b), start = b * layout.block;
    const float* v = intake.values.Get(start, count, &scratch);
    const float* m = kMomentum ? intake.momentum + start : nullptr;
    Int4 changed = {};
    const auto fill = [&](int64_t i, Float4* x) {
      float rest[kGroup], more[kGroup];
      const float *from = v + i, *old = kMomentum ? m + i : nullptr;
      if (i + kGroup > count) {
        from = Padded(from, count - i, rest);
        if (kMomentum) old = Padded(old, count - i, more);
      }
      for (int j = 0; j < kFours; ++j) {
        Float4 taken = Load4(from + 4 * j);
        if (kMomentum) taken = keep * Load4(old + 4 * j) + take * taken;
        x[j] += taken;
        const Int4 beyond = Abs4(x[j]) > limit;
        changed -= beyond;
        x[j] = Choose4(beyond, Negate4(x[j] < All4(0.0f), limit), x[j]);
      }
    };
    EncodeBlock<kBits>(residual + start, count,
                       given == nullptr ? nullptr : given + b * kBits,
                       message + b * layout.stride(), fill);
    for (int k = 0; k < 4; ++k) clipped += changed[k];
  }
  return clipped;
}

// residual <- u - q for u = mean of the workers' q + residual.
template <int kBits>
TF_BASIS_WIDE void AverageBlocks(const BlockLayout& layout,
                                 const uint8_t* messages, int64_t workers,
                                 const float* given, float* residual,
                                 uint8_t* message, int64_t begin, int64_t end) {
  const int64_t bytes = layout.message_bytes();
  const Float4 divisor = All4(static_cast<float>(workers));
  // Exact, and far cheaper than a division, where it is a power of two.
  const bool halves = (workers & (workers - 1)) == 0;
  const Float4 inverse = All4(1.0f) / divisor;
  for (int64_t b = begin; b < end; ++b) {
    const int64_t count = layout.length(b);
    const int64_t start = b * layout.stride();
    const auto fill = [&](int64_t i, Float4* x) {
      Float4 sum[kFours] = {};
      for (int64_t w = 0; w < workers; ++w) {
        const uint8_t* in = messages + w * bytes + start;
        Float4 q[kFours];
        DecodeGroup<kBits>(LoadCodes<kBits>(in + layout.header(), i, count),
                           LoadScales<kBits>(in), q);
        for (int j = 0; j < kFours; ++j) sum[j] += q[j];
      }
      for (int j = 0; j < kFours; ++j) {
        x[j] += halves ? sum[j] * inverse : sum[j] / divisor;
      }
    };
    EncodeBlock<kBits>(residual + b * layout.block, count,
                       given == nullptr ? nullptr : given + b * kBits,
                       message + start, fill);
  }
}

// What the message of one block stands for.
template <int kBits>
void DecodeBlock(const BlockLayout& layout, const uint8_t* in, int64_t count,
                 float* values) {
  const BlockScales scales = LoadScales<kBits>(in);
  ForGroups(values, count, [&](int64_t i, float* x) {
    Float4 q[kFours];
    DecodeGroup<kBits>(LoadCodes<kBits>(in + layout.header(), i, count), scales,
                       q);
    for (int j = 0; j < kFours; ++j) Store4(q[j], x + 4 * j);
  });
}

template <int kBits>
TF_BASIS_WIDE void DequantizeBlocks(const BlockLayout& layout,
                                    const uint8_t* message, float* values,
                                    int64_t begin, int64_t end) {
  for (int64_t b = begin; b < end; ++b) {
    DecodeBlock<kBits>(layout, message + b * layout.stride(), layout.length(b),
                       values + b * layout.block);
  }
}

// Sums over a block of u, u^2 and (u - q)^2, from the residual u - q and the
// message of q.
struct BlockSums {
  double u, squares, errors;
};

template <int kBits>
TF_BASIS_WIDE void SumBlocks(const BlockLayout& layout, const float* residual,
                             const uint8_t* message, BlockSums* sums,
                             int64_t begin, int64_t end) {
  std::vector<float> q(std::min(layout.block, layout.elements));
  for (int64_t b = begin; b < end; ++b) {
    const int64_t count = layout.length(b);
    DecodeBlock<kBits>(layout, message + b * layout.stride(), count, q.data());
    const float* e = residual + b * layout.block;
    Lanes u, squares, errors;
    ForGroups(q.data(), count, [&](int64_t i, const float* x) {
      float rest[kGroup];
      const float* from =
          i + kGroup > count ? Padded(e + i, count - i, rest) : e + i;
      Float4 values[kFours], square[kFours], error[kFours];
      for (int j = 0; j < kFours; ++j) {
        const Float4 left = Load4(from + 4 * j);
        values[j] = Load4(x + 4 * j) + left;
        square[j] = values[j] * values[j];
        error[j] = left * left;
      }
      u.AddGroup(values);
      squares.AddGroup(square);
      errors.AddGroup(error);
    });
    sums[b] = {u.Sum(), squares.Sum(), errors.Sum()};
  }
}

// Values that are NaN, infinite or of a magnitude above `limit`.
TF_BASIS_WIDE inline int64_t CountUnusable(const float* values, int64_t count,
                                           float limit) {
  int64_t unusable = 0;
  for (int64_t i = 0; i < count; ++i) {
    unusable += !(std::fabs(values[i]) <= limit);
  }
  return unusable;
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_BLOCK_QUANTIZE_H_
