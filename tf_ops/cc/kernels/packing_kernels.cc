#include <string>
#include <vector>

#include "core/packed_message.h"
#include "kernels/block_op.h"
#include "kernels/kernel_util.h"
#include "kernels/zlib_bytes.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_basis {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// What both ops have: the segments of a message.
class SegmentOp : public OpKernel {
 public:
  explicit SegmentOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    int64_t bits, block;
    std::vector<int64_t> elements;
    OP_REQUIRES_OK(ctx, GetBlockForm(ctx, &bits, &block));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("elements", &elements));
    constexpr int64_t kMost = int64_t{1} << 40;
    for (const int64_t count : elements) {
      OP_REQUIRES(
          ctx, count >= 0 && count < kMost,
          InvalidArgument("elements must be in [0, 2**40), received ", count));
      segments_.push_back({count, block, static_cast<int>(bits)});
      scales_ += segments_.back().blocks() * bits;
      message_bytes_ += segments_.back().message_bytes();
      OP_REQUIRES(
          ctx, message_bytes_ < kMost,
          InvalidArgument("elements must be fewer than 2**40 in all, received ",
                          count, " and others"));
    }
  }

 protected:
  std::vector<BlockLayout> segments_;
  int64_t scales_ = 0, message_bytes_ = 0;
};

class PackMessageOp : public SegmentOp {
 public:
  using SegmentOp::SegmentOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& message = ctx->input(0);
    OP_REQUIRES_OK(ctx, CheckLength(message, "message", message_bytes_));
    OP_REQUIRES(ctx, ctx->input(1).dims() == 0,
                InvalidArgument("with_scales must be a scalar, received shape ",
                                ctx->input(1).shape().DebugString()));
    const bool with_scales = ctx->input(1).scalar<bool>()();
    Tensor *sizes = nullptr, *scales = nullptr, *packed = nullptr;
    const int64_t count = segments_.size();
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({count}), &sizes));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(2, TensorShape({scales_}), &scales));
    std::string out;
    out.reserve(message_bytes_ + count * kSegmentHeader);
    const uint8_t* in = message.flat<uint8_t>().data();
    uint8_t* next = reinterpret_cast<uint8_t*>(scales->flat<float>().data());
    for (int64_t i = 0; i < count; ++i) {
      const BlockLayout& layout = segments_[i];
      const size_t before = out.size();
      const int64_t plain = ScaleBytes(layout);
      std::string codes(CodeBytes(layout), '\0');
      SplitMessage(layout, in, next, Bytes(&codes));
      SegmentKind kind = kNoScales;
      std::string sent;
      if (with_scales) {
        kind = kScales;
        sent.resize(plain);
        ToPlanes(next, plain, Bytes(&sent));
        std::string deflated;
        OP_REQUIRES_OK(ctx, Deflate(sent, &deflated));
        if (deflated.size() < sent.size()) {
          kind = kDeflated;
          sent.swap(deflated);
        }
      }
      uint8_t header[kSegmentHeader];
      StoreHeader(kind, sent.size(), header);
      out.append(reinterpret_cast<const char*>(header), kSegmentHeader);
      out += sent;
      out += codes;
      const size_t bytes = out.size() - before;
      OP_REQUIRES(ctx, bytes < size_t{1} << 31,
                  InvalidArgument("a segment must pack into fewer than 2**31 "
                                  "bytes, received ",
                                  bytes));
      sizes->vec<int32_t>()(i) = static_cast<int32_t>(bytes);
      in += layout.message_bytes();
      next += plain;
    }
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(
                 0, TensorShape({static_cast<int64_t>(out.size())}), &packed));
    std::memcpy(packed->flat<uint8_t>().data(), out.data(), out.size());
  }

 private:
  static uint8_t* Bytes(std::string* text) {
    return reinterpret_cast<uint8_t*>(text->data());
  }
};

class UnpackMessageOp : public SegmentOp {
 public:
  using SegmentOp::SegmentOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& packed = ctx->input(0);
    OP_REQUIRES(ctx, packed.dims() == 1,
                InvalidArgument("packed must be of rank 1, received ",
                                packed.shape().DebugString()));
    OP_REQUIRES_OK(ctx, CheckLength(ctx->input(1), "known", scales_));
    Tensor *message = nullptr, *scales = nullptr;
    OP_REQUIRES_OK(
        ctx, ctx->allocate_output(0, TensorShape({message_bytes_}), &message));
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(1, TensorShape({scales_}), &scales));
    const uint8_t* in = packed.flat<uint8_t>().data();
    const uint8_t* const end = in + packed.NumElements();
    const uint8_t* known =
        reinterpret_cast<const uint8_t*>(ctx->input(1).flat<float>().data());
    uint8_t* found = reinterpret_cast<uint8_t*>(scales->flat<float>().data());
    uint8_t* out = message->flat<uint8_t>().data();
    for (const BlockLayout& layout : segments_) {
      const int64_t plain = ScaleBytes(layout);
      Segment segment;
      const Parsed parsed = ParseSegment(layout, in, end - in, &segment);
      OP_REQUIRES(ctx, parsed != Parsed::kCutOff,
                  InvalidArgument("packed must hold ", segments_.size(),
                                  " whole segments, received ",
                                  packed.NumElements(), " bytes"));
      OP_REQUIRES(
          ctx, parsed != Parsed::kBadKind,
          InvalidArgument("packed must have segments of the kinds 0 to "
                          "2, received kind ",
                          int{segment.kind}, " of ", segment.length, " bytes"));
      tensorflow::tstring inflated;
      if (segment.kind == kDeflated) {
        OP_REQUIRES_OK(ctx,
                       Inflate({reinterpret_cast<const char*>(segment.sent),
                                segment.length},
                               plain, &inflated));
        FromPlanes(reinterpret_cast<const uint8_t*>(inflated.data()), plain,
                   found);
      } else if (segment.kind == kScales) {
        FromPlanes(segment.sent, plain, found);
      } else {
        std::memcpy(found, known, plain);
      }
      JoinMessage(layout, found, segment.codes, out);
      in += segment.bytes;
      known += plain;
      found += plain;
      out += layout.message_bytes();
    }
    OP_REQUIRES(ctx, in == end,
                InvalidArgument("packed must end with its last segment, ",
                                "received ", end - in, " bytes more"));
  }
};

#define REGISTER(Verb)     \
  REGISTER_KERNEL_BUILDER( \
      Name("TfBasis>" #Verb).Device(tensorflow::DEVICE_CPU), Verb##Op)
REGISTER(PackMessage);
REGISTER(UnpackMessage);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
