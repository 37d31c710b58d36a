// libFuzzer: packed messages as they arrive, in memory of their exact length.
#include <algorithm>
#include <vector>

#include "core/packed_message.h"
#include "source.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tf_basis;
  constexpr size_t kChoices = 8;
  if (size < kChoices) return 0;
  exercise::Source source(data, kChoices);
  const int bits = source.Flip() ? 1 : 2;
  const int64_t block = 8 * (1 + source.Below(8));
  std::vector<BlockLayout> segments(1 + source.Below(3));
  for (BlockLayout& each : segments) each = {source.Below(100), block, bits};
  const std::vector<uint8_t> packed(data + kChoices, data + size);
  const uint8_t* in = packed.data();
  const uint8_t* const end = in + packed.size();
  for (const BlockLayout& layout : segments) {
    Segment segment;
    if (ParseSegment(layout, in, end - in, &segment) != Parsed::kWhole) break;
    CHECK(segment.bytes > 0 && segment.bytes <= end - in);
    const int64_t plain = ScaleBytes(layout);
    std::vector<uint8_t> scales(plain), message(layout.message_bytes());
    if (segment.kind == kScales) {
      FromPlanes(segment.sent, plain, scales.data());
    } else if (segment.kind == kDeflated) {  // inflating is TensorFlow's
      std::copy_n(segment.sent, std::min<int64_t>(plain, segment.length),
                  scales.data());
    }
    JoinMessage(layout, scales.data(), segment.codes, message.data());
    std::vector<uint8_t> again(plain), codes(CodeBytes(layout));
    SplitMessage(layout, message.data(), again.data(), codes.data());
    CHECK(again == scales);
    CHECK(std::equal(codes.begin(), codes.end(), segment.codes));
    in += segment.bytes;
  }
  return 0;
}
