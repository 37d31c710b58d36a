// Number formats that state can be kept in, and stochastic rounding to them.
// tf_basis/rules/formats.py is the pure-TensorFlow twin.
#ifndef TF_BASIS_CORE_FORMATS_H_
#define TF_BASIS_CORE_FORMATS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/hash.h"

namespace tf_basis {

enum class Format { kFloat32, kBfloat16, kFloat16, kLog8 };

inline uint32_t BitsOf(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float FromBits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Random bits that depend on what is written where and when, and on nothing
// else: replicas that do the same step round alike.
class RoundingKey {
 public:
  // `slot` tells apart the variables of one table.
  RoundingKey(uint32_t seed, uint32_t slot, int64_t row, int64_t step)
      : base_(Fmix32(Murmur3(row, seed ^ (slot * 0x85ebca77u)) ^
                     static_cast<uint32_t>(step) * 0x9e3779b1u)) {}

  uint32_t operator()(int64_t column) const {
    return Fmix32(base_ + static_cast<uint32_t>(column) * 0x9e3779b9u);
  }

 private:
  uint32_t base_;
};

// Rounds |x| up or down to `mantissa_bits`, up with the probability that makes
// the mean exact. Exponents below `min_exponent` keep that one's spacing.
inline float StochasticRound(float x, int mantissa_bits, int min_exponent,
                             float largest, uint32_t random) {
  if (!std::isfinite(x)) return x;
  const uint32_t bits = BitsOf(x);
  const int exponent =
      std::max(static_cast<int>((bits >> 23) & 0xff) - 127, min_exponent);
  const float spacing =
      FromBits(static_cast<uint32_t>(exponent - mantissa_bits + 127) << 23);
  const int fraction_bits = 23 - mantissa_bits;
  const float chance = static_cast<float>(random >> (32 - fraction_bits)) /
                       static_cast<float>(1u << fraction_bits);
  const float rounded =
      std::min(std::floor(std::fabs(x) / spacing + chance) * spacing, largest);
  return std::copysign(rounded, x);
}

inline float RoundBfloat16(float x, uint32_t random) {
  return StochasticRound(x, 7, -119, 3.3895314e38f, random);
}

inline float RoundFloat16(float x, uint32_t random) {
  return StochasticRound(x, 10, -14, 65504.0f, random);
}

inline float DecodeBfloat16(uint16_t code) {
  return FromBits(static_cast<uint32_t>(code) << 16);
}

// `x` must be a bfloat16 value already.
inline uint16_t EncodeBfloat16(float x) {
  if (std::isnan(x)) return 0x7fc0;
  return static_cast<uint16_t>(BitsOf(x) >> 16);
}

inline float DecodeFloat16(uint16_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x8000) << 16;
  const int exponent = (code >> 10) & 0x1f;
  const uint32_t mantissa = code & 0x3ff;
  float magnitude;
  if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * FromBits((127 - 24) << 23);
  } else if (exponent == 31) {
    magnitude = FromBits(0x7f800000u | (mantissa << 13));
  } else {
    magnitude = FromBits((static_cast<uint32_t>(exponent + 112) << 23) |
                         (mantissa << 13));
  }
  return FromBits(BitsOf(magnitude) | sign);
}

// `x` must be a float16 value already.
inline uint16_t EncodeFloat16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(x);
  if (std::isnan(x)) return 0x7e00;
  if (std::isinf(x)) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < FromBits((127 - 14) << 23)) {  // a multiple of 2^-24
    return static_cast<uint16_t>(
        sign | static_cast<uint16_t>(magnitude * FromBits((127 + 24) << 23)));
  }
  const uint32_t exponent = ((bits >> 23) & 0xff) - 112;
  return static_cast<uint16_t>(sign | (exponent << 10) |
                               ((bits >> 13) & 0x3ff));
}

// An 8-bit logarithm of numbers >= 0: code 0 is 0, code c is 2^((c - 1) / 4 -
// 50), from 1e-15 to 1e4 in steps of 19 %.
class Log8 {
 public:
  static constexpr int kMost = 255;

  static float Decode(int code) {
    static constexpr float kQuarters[4] = {1.0f, 1.18920712f, 1.41421354f,
                                           1.68179283f};
    if (code == 0) return 0.0f;
    const uint32_t octave = static_cast<uint32_t>((code - 1) / 4 - 50 + 127);
    return FromBits(octave << 23) * kQuarters[(code - 1) % 4];
  }

  // The code of one of the two neighbours of `x`, so that the mean is exact.
  static uint8_t Encode(float x, uint32_t random) {
    if (!(x > 0.0f)) return 0;
    if (x >= Decode(kMost)) return kMost;
    // A positive number never becomes 0, which means "not seen yet".
    if (x < Decode(1)) return 1;
    const int exponent = static_cast<int>((BitsOf(x) >> 23) & 0xff) - 127;
    int code = 4 * (exponent + 50) + 1;
    while (x >= Decode(code + 1)) ++code;
    const float low = Decode(code), high = Decode(code + 1);
    const float chance =
        static_cast<float>(random >> 8) * FromBits((127 - 24) << 23);
    return static_cast<uint8_t>(chance < (x - low) / (high - low) ? code + 1
                                                                  : code);
  }
};

// Asks for memory that will be used soon. GCC 12 takes a function that does
// nothing but prefetch for one without effect, and drops its calls: the empty
// asm statement is the effect that keeps them.
inline void PrefetchBytes(const void* data, int64_t bytes) {
  constexpr int64_t kLine = 64, kMostLines = 8;  // hardware follows long rows
  const char* begin = static_cast<const char*>(data);
  for (int64_t i = 0; i < std::min(bytes, kLine * kMostLines); i += kLine) {
    __builtin_prefetch(begin + i, 1);
  }
  asm volatile("");
}

// Rows of numbers in one of the formats, seen as float32.
class Rows {
 public:
  Rows() = default;
  Rows(void* data, Format format, int64_t dim)
      : data_(data), format_(format), dim_(dim) {}

  explicit operator bool() const { return data_ != nullptr; }

  void Prefetch(int64_t row) const {
    const int64_t width = dim_ * (format_ == Format::kFloat32 ? 4 : 2);
    PrefetchBytes(static_cast<const char*>(data_) + row * width, width);
  }

  // The row as float32: in place where it is, else copied to `scratch`.
  float* Open(int64_t row, float* scratch) const {
    if (format_ == Format::kFloat32) {
      return static_cast<float*>(data_) + row * dim_;
    }
    const uint16_t* codes = static_cast<const uint16_t*>(data_) + row * dim_;
    for (int64_t j = 0; j < dim_; ++j) {
      scratch[j] = format_ == Format::kBfloat16 ? DecodeBfloat16(codes[j])
                                                : DecodeFloat16(codes[j]);
    }
    return scratch;
  }

  // Writes back what Open gave; `values` then hold what has been stored.
  void Close(int64_t row, float* values, const RoundingKey& random) const {
    if (format_ == Format::kFloat32) return;
    uint16_t* codes = static_cast<uint16_t*>(data_) + row * dim_;
    for (int64_t j = 0; j < dim_; ++j) {
      if (format_ == Format::kBfloat16) {
        values[j] = RoundBfloat16(values[j], random(j));
        codes[j] = EncodeBfloat16(values[j]);
      } else {
        values[j] = RoundFloat16(values[j], random(j));
        codes[j] = EncodeFloat16(values[j]);
      }
    }
  }

 private:
  void* data_ = nullptr;
  Format format_ = Format::kFloat32;
  int64_t dim_ = 0;
};

// One number a row.
class Numbers {
 public:
  Numbers() = default;
  Numbers(void* data, Format format) : data_(data), format_(format) {}

  explicit operator bool() const { return data_ != nullptr; }

  void Prefetch(int64_t row) const {
    const int64_t width = format_ == Format::kFloat32 ? 4
                          : format_ == Format::kLog8  ? 1
                                                      : 2;
    PrefetchBytes(static_cast<const char*>(data_) + row * width, width);
  }

  float Read(int64_t row) const {
    switch (format_) {
      case Format::kFloat32:
        return static_cast<const float*>(data_)[row];
      case Format::kBfloat16:
        return DecodeBfloat16(static_cast<const uint16_t*>(data_)[row]);
      case Format::kFloat16:
        return DecodeFloat16(static_cast<const uint16_t*>(data_)[row]);
      case Format::kLog8:
        return Log8::Decode(static_cast<const uint8_t*>(data_)[row]);
    }
    return 0.0f;
  }

  // Returns the value that has been stored.
  float Write(int64_t row, float value, const RoundingKey& random) const {
    switch (format_) {
      case Format::kFloat32:
        return static_cast<float*>(data_)[row] = value;
      case Format::kBfloat16:
        value = RoundBfloat16(value, random(0));
        static_cast<uint16_t*>(data_)[row] = EncodeBfloat16(value);
        return value;
      case Format::kFloat16:
        value = RoundFloat16(value, random(0));
        static_cast<uint16_t*>(data_)[row] = EncodeFloat16(value);
        return value;
      case Format::kLog8:
        static_cast<uint8_t*>(data_)[row] = Log8::Encode(value, random(0));
        return Read(row);
    }
    return 0.0f;
  }

 private:
  void* data_ = nullptr;
  Format format_ = Format::kFloat32;
};

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_FORMATS_H_
