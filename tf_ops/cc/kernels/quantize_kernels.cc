#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <vector>

#include "core/block_quantize.h"
#include "kernels/block_op.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_basis {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Asks for huge pages for a long output that is new memory: page by page, the
// system takes several times as long to provide it as the op to fill it.
void AdviseHugePages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const uintptr_t start = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (start + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t last = (start + bytes) & ~(kHugePage - 1);
  // Only advice: where it is not followed, nothing changes.
  if (first < last) {
    madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  }
#endif
}

// The scales of a list of none or one tensor; null for none.
absl::Status GivenScales(OpKernelContext* ctx, const BlockLayout& layout,
                         const float** given) {
  tensorflow::OpInputList scales;
  TF_RETURN_IF_ERROR(ctx->input_list("scales", &scales));
  if (scales.size() == 0) return absl::OkStatus();
  if (scales.size() > 1) {
    return InvalidArgument("scales must be one tensor or none, received ",
                           scales.size());
  }
  *given = scales[0].flat<float>().data();
  return CheckLength(scales[0], "scales", layout.blocks() * layout.bits);
}

absl::Status AllocateMessage(OpKernelContext* ctx, const BlockLayout& layout,
                             uint8_t** message) {
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(
      ctx->allocate_output(0, TensorShape({layout.message_bytes()}), &output));
  *message = output->flat<uint8_t>().data();
  return absl::OkStatus();
}

void Decode(OpKernelContext* ctx, const BlockLayout& layout,
            const Tensor& message, float* values) {
  WithBits(layout.bits, [&](auto bits) {
    ForBlocks(ctx, layout, /*cycles_per_element=*/1,
              [&](int64_t begin, int64_t end) {
                DequantizeBlocks<bits()>(layout, message.flat<uint8_t>().data(),
                                         values, begin, end);
              });
  });
}

class QuantizeBlocksOp : public BlockOp {
 public:
  explicit QuantizeBlocksOp(OpKernelConstruction* ctx) : BlockOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("clip_value", &clip_value_));
    OP_REQUIRES(ctx, clip_value_ >= 0,
                InvalidArgument("clip_value must be at least 0, received ",
                                clip_value_));
    int64_t momenta;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("momenta", &momenta));
    OP_REQUIRES(ctx, momenta <= 1,
                InvalidArgument("momenta must be 0 or 1, received ", momenta));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keep", &keep_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("take", &take_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::OpInputList values, momenta;
    OP_REQUIRES_OK(ctx, ctx->input_list("values", &values));
    OP_REQUIRES_OK(ctx, ctx->input_list("momentum", &momenta));
    std::vector<int> inputs = {0};
    if (momenta.size() > 0) inputs.push_back(1 + values.size());
    LockedVariables locked;
    BlockLayout layout;
    OP_REQUIRES_OK(ctx, Lock(ctx, inputs, "residual", &locked, &layout));
    Intake intake;
    OP_REQUIRES_OK(ctx, TakePieces(values, layout, &intake.values));
    if (momenta.size() > 0) {
      OP_REQUIRES_OK(
          ctx, CheckLength(locked.tensor(1), "momentum", layout.elements));
      intake.momentum = static_cast<const float*>(locked.data(1));
      intake.keep = keep_;
      intake.take = take_;
    }
    const float* given = nullptr;
    OP_REQUIRES_OK(ctx, GivenScales(ctx, layout, &given));
    uint8_t* message = nullptr;
    OP_REQUIRES_OK(ctx, AllocateMessage(ctx, layout, &message));
    Tensor* clipped = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({}), &clipped));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0));
    float* residual = static_cast<float*>(locked.data(0));
    std::atomic<int64_t> count{0};
    WithBits(layout.bits, [&](auto bits) {
      const auto quantize = intake.momentum == nullptr
                                ? &QuantizeBlocks<bits(), false>
                                : &QuantizeBlocks<bits(), true>;
      ForBlocks(ctx, layout, /*cycles_per_element=*/2 * bits,
                [&](int64_t begin, int64_t end) {
                  count += quantize(layout, intake, clip_value_, given,
                                    residual, message, begin, end);
                });
    });
    clipped->scalar<int64_t>()() = count;
  }

 private:
  float clip_value_, keep_, take_;
};

class AverageBlocksOp : public BlockOp {
 public:
  explicit AverageBlocksOp(OpKernelConstruction* ctx) : BlockOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("workers", &workers_));
    OP_REQUIRES(
        ctx, workers_ < int64_t{1} << 31,
        InvalidArgument("workers must be below 2**31, received ", workers_));
  }

  void Compute(OpKernelContext* ctx) override {
    LockedVariables locked;
    BlockLayout layout;
    OP_REQUIRES_OK(ctx, Lock(ctx, {0}, "residual", &locked, &layout));
    const Tensor& messages = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckLength(messages, "messages",
                                    workers_ * layout.message_bytes()));
    const float* given = nullptr;
    OP_REQUIRES_OK(ctx, GivenScales(ctx, layout, &given));
    uint8_t* message = nullptr;
    OP_REQUIRES_OK(ctx, AllocateMessage(ctx, layout, &message));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0));
    float* residual = static_cast<float*>(locked.data(0));
    WithBits(layout.bits, [&](auto bits) {
      ForBlocks(ctx, layout, /*cycles_per_element=*/(2 + workers_) * bits,
                [&](int64_t begin, int64_t end) {
                  AverageBlocks<bits()>(layout, messages.flat<uint8_t>().data(),
                                        workers_, given, residual, message,
                                        begin, end);
                });
    });
  }

 private:
  int64_t workers_;
};

class DequantizeBlocksOp : public BlockOp {
 public:
  using BlockOp::BlockOp;

  void Compute(OpKernelContext* ctx) override {
    const Tensor& message = ctx->input(0);
    OP_REQUIRES(ctx, ctx->input(1).dims() == 0,
                InvalidArgument("elements must be a scalar, received shape ",
                                ctx->input(1).shape().DebugString()));
    const int64_t elements = ctx->input(1).scalar<int64_t>()();
    OP_REQUIRES(
        ctx, elements >= 0 && elements < int64_t{1} << 62,
        InvalidArgument("elements must be in [0, 2**62), received ", elements));
    const BlockLayout layout = Layout(elements);
    OP_REQUIRES_OK(ctx, CheckMessage(message, layout));
    Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({elements}), &values));
    AdviseHugePages(values->data(), values->TotalBytes());
    Decode(ctx, layout, message, values->flat<float>().data());
  }
};

class DequantizeIntoOp : public BlockOp {
 public:
  using BlockOp::BlockOp;

  void Compute(OpKernelContext* ctx) override {
    LockedVariables locked;
    BlockLayout layout;
    OP_REQUIRES_OK(ctx, Lock(ctx, {0}, "values", &locked, &layout));
    const Tensor& message = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckMessage(message, layout));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0, /*share_reads=*/true));
    Decode(ctx, layout, message, static_cast<float*>(locked.data(0)));
  }
};

class MessageStatisticsOp : public BlockOp {
 public:
  using BlockOp::BlockOp;

  void Compute(OpKernelContext* ctx) override {
    LockedVariables locked;
    BlockLayout layout;
    OP_REQUIRES_OK(ctx, Lock(ctx, {0}, "residual", &locked, &layout));
    const Tensor& message = ctx->input(1);
    OP_REQUIRES_OK(ctx, CheckMessage(message, layout));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({3}), &output));
    const float* residual = static_cast<const float*>(locked.data(0));
    std::vector<BlockSums> sums(layout.blocks());
    WithBits(layout.bits, [&](auto bits) {
      ForBlocks(ctx, layout, /*cycles_per_element=*/2,
                [&](int64_t begin, int64_t end) {
                  SumBlocks<bits()>(layout, residual,
                                    message.flat<uint8_t>().data(), sums.data(),
                                    begin, end);
                });
    });
    // In the order of the blocks, whatever the number of threads.
    BlockSums total = {};
    for (const BlockSums& each : sums) {
      total.u += each.u;
      total.squares += each.squares;
      total.errors += each.errors;
    }
    auto out = output->vec<double>();
    out(0) = total.u;
    out(1) = total.squares;
    out(2) = total.errors;
  }
};

class CountUnusableOp : public OpKernel {
 public:
  explicit CountUnusableOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("limit", &limit_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& values = ctx->input(0);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, TensorShape({}), &output));
    const float* data = values.flat<float>().data();
    std::atomic<int64_t> count{0};
    ThreadsOf(ctx)(values.NumElements(), /*cost=*/1,
                   [&](int64_t begin, int64_t end) {
                     count += CountUnusable(data + begin, end - begin, limit_);
                   });
    output->scalar<int64_t>()() = count;
  }

 private:
  float limit_;
};

#define REGISTER(Verb)     \
  REGISTER_KERNEL_BUILDER( \
      Name("TfBasis>" #Verb).Device(tensorflow::DEVICE_CPU), Verb##Op)
REGISTER(QuantizeBlocks);
REGISTER(AverageBlocks);
REGISTER(DequantizeBlocks);
REGISTER(DequantizeInto);
REGISTER(MessageStatistics);
REGISTER(CountUnusable);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
