// Everything on messages: quantise, average, decode, sum, pack, step.
#ifndef TF_BASIS_TESTS_CC_EXERCISE_MESSAGES_H_
#define TF_BASIS_TESTS_CC_EXERCISE_MESSAGES_H_

#include <vector>

#include "core/frozen_step.h"
#include "core/packed_message.h"
#include "source.h"

namespace tf_basis {
namespace exercise {

// Lengths of interest: none, one, about a group, about some blocks.
inline BlockLayout AnyLayout(Source* source, int bits) {
  const int64_t block = 8 * (1 + source->Below(source->Flip() ? 4 : 40));
  int64_t elements = source->Below(4);
  if (source->Flip())
    elements = block * source->Below(6) + source->Below(block);
  return {elements, source->Byte() == 0 ? int64_t{1} << 62 : block, bits};
}

inline std::vector<float> ScalesFor(const BlockLayout& layout, Source* source,
                                    bool wild) {
  return source->Numbers(layout.blocks() * layout.bits, wild);
}

// The message of values + residual, which `residual` becomes the rest of.
template <int kBits>
std::vector<uint8_t> Quantized(const BlockLayout& layout, Source* source,
                               bool wild, const ParallelFor& parallel_for,
                               std::vector<float>* residual, Digest* digest) {
  const auto values = source->Numbers(layout.elements, wild);
  const auto momentum = source->Numbers(layout.elements, wild);
  const auto scales = ScalesFor(layout, source, wild);
  const bool mixes = source->Flip();
  const float* given = source->Flip() ? scales.data() : nullptr;
  const float clip = source->Flip() ? 0.0f : std::fabs(source->Number(false));
  Intake intake;
  for (int64_t from = 0; from < layout.elements;) {
    const int64_t count =
        std::min(layout.elements - from, source->Below(layout.elements + 1));
    intake.values.Add(values.data() + from, count);
    from += count;
  }
  if (mixes) {
    intake.momentum = momentum.data();
    intake.keep = source->Number(wild);
    intake.take = source->Number(wild);
  }
  const auto before = *residual;
  std::vector<uint8_t> message(layout.message_bytes(), 0xa5);
  std::vector<int64_t> clipped(layout.blocks());
  const auto work =
      mixes ? &QuantizeBlocks<kBits, true> : &QuantizeBlocks<kBits, false>;
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    clipped[begin] = work(layout, intake, clip, given, residual->data(),
                          message.data(), begin, end);
  });
  int64_t total = 0;
  for (const int64_t count : clipped) total += count;
  digest->Add(std::vector<int64_t>{total});
  if (clip == 0.0f) CHECK(total == 0);
  std::vector<float> decoded(layout.elements);
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    DequantizeBlocks<kBits>(layout, message.data(), decoded.data(), begin, end);
  });
  for (int64_t i = 0; !wild && !mixes && clip == 0 && i < layout.elements;
       ++i) {
    CHECK((*residual)[i] == (before[i] + values[i]) - decoded[i]);
  }
  digest->Add(decoded);
  return message;
}

// As it travels, and back.
inline void Pack(const BlockLayout& layout,
                 const std::vector<uint8_t>& message) {
  const int64_t plain = ScaleBytes(layout), codes = CodeBytes(layout);
  CHECK(plain + codes == layout.message_bytes());
  std::vector<uint8_t> scales(plain), found(plain), back(message.size());
  std::vector<uint8_t> packed(kSegmentHeader + plain + codes);
  SplitMessage(layout, message.data(), scales.data(),
               packed.data() + kSegmentHeader + plain);
  ToPlanes(scales.data(), plain, packed.data() + kSegmentHeader);
  StoreHeader(kScales, plain, packed.data());
  Segment segment;
  const int64_t size = static_cast<int64_t>(packed.size());
  CHECK(ParseSegment(layout, packed.data(), size, &segment) == Parsed::kWhole);
  CHECK(segment.bytes == size && segment.kind == kScales);
  FromPlanes(segment.sent, plain, found.data());
  JoinMessage(layout, found.data(), segment.codes, back.data());
  CHECK(back == message && found == scales);
  Segment cut;
  CHECK(ParseSegment(layout, packed.data(), size - 1, &cut) != Parsed::kWhole);
}

// Variables in order, perhaps with gaps, and the memory of their values.
inline std::vector<Target> Targets(int64_t elements, Source* source, bool wild,
                                   std::vector<std::vector<float>>* memory) {
  std::vector<Target> targets;
  int64_t reached = 0;
  for (int64_t left = source->Below(6); left > 0; --left) {
    const int64_t start = reached + source->Below(elements - reached + 1) / 4;
    const int64_t count = source->Below(elements - start + 1);
    memory->push_back(source->Numbers(count, wild));
    targets.push_back({start, count, memory->back().data(), source->Flip()});
    reached = start + count;
  }
  return targets;
}

template <int kBits>
void Steps(const BlockLayout& layout, Source* source, bool wild,
           const std::vector<uint8_t>& message, const ParallelFor& parallel_for,
           Digest* digest) {
  auto first = source->Numbers(layout.elements, wild);
  auto drift = source->Numbers(layout.elements, wild);
  auto second = source->Numbers(layout.elements, wild);
  for (float& x : second) x = wild ? x : std::fabs(x);
  std::vector<std::vector<float>> memory;
  memory.reserve(8);
  const auto targets = Targets(layout.elements, source, wild, &memory);
  const FrozenStep step = {source->Number(wild), source->Number(wild),
                           wild ? source->Number(true) : 1e-3f,
                           source->Number(wild)};
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    StepBlocks<kBits>(layout, step, message.data(), first.data(), second.data(),
                      targets, begin, end);
  });
  digest->Add(first);
  for (const auto& values : memory) digest->Add(values);
  const LocalStep local = {step, source->Number(wild), source->Number(wild)};
  const auto taken = source->Numbers(layout.elements, wild);
  Pieces pieces;
  const int64_t cut = source->Below(layout.elements + 1);
  pieces.Add(taken.data(), cut);
  pieces.Add(taken.data() + cut, layout.elements - cut);
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    StepAlone(layout, local, pieces, first.data(), second.data(), drift.data(),
              targets, begin, end);
  });
  digest->Add(first);
  digest->Add(drift);
  for (const auto& values : memory) digest->Add(values);
}

template <int kBits>
uint64_t ExerciseBits(Source* source, const ParallelFor& parallel_for) {
  const bool wild = source->Flip();
  const BlockLayout layout = AnyLayout(source, kBits);
  Digest digest;
  auto residual = source->Numbers(layout.elements, wild);
  // Bytes of anyone: they may say anything, and stay inside.
  const int64_t workers = 1 + source->Below(4);
  const auto received = source->Bytes(workers * layout.message_bytes());
  auto message = source->Bytes(layout.message_bytes());
  Pack(layout, message);
  const auto scales = ScalesFor(layout, source, wild);
  const float* given = source->Flip() ? scales.data() : nullptr;
  auto rest = residual;
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    AverageBlocks<kBits>(layout, received.data(), workers, given, rest.data(),
                         message.data(), begin, end);
  });
  digest.Add(rest);
  digest.Add(message);
  Pack(layout, message);
  message =
      Quantized<kBits>(layout, source, wild, parallel_for, &residual, &digest);
  digest.Add(residual);
  digest.Add(message);
  std::vector<BlockSums> sums(layout.blocks());
  parallel_for(layout.blocks(), 1, [&](int64_t begin, int64_t end) {
    SumBlocks<kBits>(layout, residual.data(), message.data(), sums.data(),
                     begin, end);
  });
  digest.Add(sums);
  for (const BlockSums& each : sums) {
    if (!wild) CHECK(each.squares >= 0 && each.errors >= 0);
  }
  Steps<kBits>(layout, source, wild, message, parallel_for, &digest);
  const int64_t unusable =
      CountUnusable(residual.data(), layout.elements, 1e37f);
  CHECK(unusable >= 0 && unusable <= layout.elements);
  if (!wild) CHECK(unusable == 0);
  return digest.value();
}

inline uint64_t ExerciseMessages(Source* source,
                                 const ParallelFor& parallel_for) {
  return source->Flip() ? ExerciseBits<1>(source, parallel_for)
                        : ExerciseBits<2>(source, parallel_for);
}

}  // namespace exercise
}  // namespace tf_basis

#endif  // TF_BASIS_TESTS_CC_EXERCISE_MESSAGES_H_
