// Messages as they travel where scales do not go along every time.
//
// A message is sent in segments of whole blocks. Packed, a segment is
//
//   1 byte   what follows: 0 no scales, 1 the scales, 2 the scales deflated
//   4 bytes  how many bytes that is, little-endian
//   the scales of all its blocks, byte 0 of each, then byte 1 of each, ...:
//            of numbers alike in size the upper bytes are alike
//   the codes of all its blocks
#ifndef TF_BASIS_CORE_PACKED_MESSAGE_H_
#define TF_BASIS_CORE_PACKED_MESSAGE_H_

#include <cstdint>
#include <cstring>

#include "core/block_quantize.h"

namespace tf_basis {

constexpr int64_t kSegmentHeader = 5;
enum SegmentKind : uint8_t { kNoScales = 0, kScales = 1, kDeflated = 2 };

inline int64_t ScaleBytes(const BlockLayout& layout) {
  return layout.blocks() * layout.header();
}

inline int64_t CodeBytes(const BlockLayout& layout) {
  return layout.message_bytes() - ScaleBytes(layout);
}

inline int64_t CodeBytes(const BlockLayout& layout, int64_t b) {
  return (layout.length(b) * layout.bits + 7) / 8;
}

// Takes a message apart.
inline void SplitMessage(const BlockLayout& layout, const uint8_t* message,
                         uint8_t* scales, uint8_t* codes) {
  for (int64_t b = 0; b < layout.blocks(); ++b) {
    std::memcpy(scales + b * layout.header(), message, layout.header());
    const int64_t bytes = CodeBytes(layout, b);
    std::memcpy(codes, message + layout.header(), bytes);
    message += layout.header() + bytes;
    codes += bytes;
  }
}

// Puts one together.
inline void JoinMessage(const BlockLayout& layout, const uint8_t* scales,
                        const uint8_t* codes, uint8_t* message) {
  for (int64_t b = 0; b < layout.blocks(); ++b) {
    std::memcpy(message, scales + b * layout.header(), layout.header());
    const int64_t bytes = CodeBytes(layout, b);
    std::memcpy(message + layout.header(), codes, bytes);
    message += layout.header() + bytes;
    codes += bytes;
  }
}

// Bytes of float32, plane after plane, and back.
inline void ToPlanes(const uint8_t* in, int64_t bytes, uint8_t* out) {
  const int64_t count = bytes / 4;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < 4; ++k) out[k * count + i] = in[4 * i + k];
  }
}

inline void FromPlanes(const uint8_t* in, int64_t bytes, uint8_t* out) {
  const int64_t count = bytes / 4;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < 4; ++k) out[4 * i + k] = in[k * count + i];
  }
}

// A segment found in packed bytes.
struct Segment {
  uint8_t kind = kNoScales;
  uint32_t length = 0;            // of what was sent of the scales
  const uint8_t* sent = nullptr;  // that
  const uint8_t* codes = nullptr;
  int64_t bytes = 0;  // of all of it
};

enum class Parsed { kWhole, kCutOff, kBadKind };

// Finds the segment at the start of `in`, which has `left` bytes. Whether what
// was deflated is of the right length is left to whoever inflates it.
inline Parsed ParseSegment(const BlockLayout& layout, const uint8_t* in,
                           int64_t left, Segment* out) {
  if (left >= kSegmentHeader) {
    out->kind = in[0];
    std::memcpy(&out->length, in + 1, sizeof(out->length));
  }
  out->bytes = kSegmentHeader + out->length + CodeBytes(layout);
  if (left < out->bytes) return Parsed::kCutOff;
  const bool fits = out->kind == kNoScales ? out->length == 0
                    : out->kind == kScales ? out->length == ScaleBytes(layout)
                                           : out->kind == kDeflated;
  if (!fits) return Parsed::kBadKind;
  out->sent = in + kSegmentHeader;
  out->codes = out->sent + out->length;
  return Parsed::kWhole;
}

inline void StoreHeader(SegmentKind kind, int64_t bytes, uint8_t* out) {
  out[0] = kind;
  const uint32_t length = static_cast<uint32_t>(bytes);
  std::memcpy(out + 1, &length, sizeof(length));
}

}  // namespace tf_basis

#endif  // TF_BASIS_CORE_PACKED_MESSAGE_H_
