#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

#include "core/block_quantize.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/denormal.h"

namespace tf_basis {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Calls work(begin, end) over the blocks on the threads of the device. Those
// take denormal numbers for zero; the calling thread, which works too, need
// not.
void ForBlocks(OpKernelContext* ctx, const BlockLayout& layout,
               int64_t cycles_per_element,
               const std::function<void(int64_t, int64_t)>& work) {
  const int64_t longest = std::min(layout.block, layout.elements);
  ThreadsOf(ctx)(layout.blocks(), longest * cycles_per_element,
                 [&](int64_t begin, int64_t end) {
                   const tensorflow::port::ScopedFlushDenormal flush;
                   work(begin, end);
                 });
}

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

// Calls work with the width of the codes as a type.
template <typename Work>
void WithBits(int bits, const Work& work) {
  if (bits == 1) {
    work(std::integral_constant<int, 1>());
  } else {
    work(std::integral_constant<int, 2>());
  }
}

// What all these ops have: how vectors are cut.
class BlockOp : public OpKernel {
 public:
  explicit BlockOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("bits", &bits_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("block", &block_));
    OP_REQUIRES(ctx, bits_ == 1 || bits_ == 2,
                InvalidArgument("bits must be 1 or 2, received ", bits_));
    OP_REQUIRES(
        ctx, block_ >= 8 && block_ % 8 == 0,
        InvalidArgument("block must be a multiple of 8, received ", block_));
  }

 protected:
  BlockLayout Layout(int64_t elements) const {
    return {elements, block_, static_cast<int>(bits_)};
  }

  static absl::Status CheckLength(const Tensor& tensor, const char* name,
                                  int64_t length) {
    if (tensor.shape() == TensorShape({length})) return absl::OkStatus();
    return InvalidArgument(name, " must have the shape [", length,
                           "], received ", tensor.shape().DebugString());
  }

  // The residual, locked; not yet writable.
  static absl::Status Lock(OpKernelContext* ctx, LockedVariables* locked) {
    TF_RETURN_IF_ERROR(locked->Lock(
        ctx, {ctx->input(0).scalar<tensorflow::ResourceHandle>()()}));
    const Tensor& residual = locked->tensor(0);
    if (residual.dtype() == tensorflow::DT_FLOAT && residual.dims() == 1) {
      return absl::OkStatus();
    }
    return InvalidArgument("residual must be float and of rank 1, received ",
                           tensorflow::DataTypeString(residual.dtype()), " of ",
                           residual.shape().DebugString());
  }

  static absl::Status AllocateMessage(OpKernelContext* ctx,
                                      const BlockLayout& layout,
                                      uint8_t** message) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(
        0, TensorShape({layout.message_bytes()}), &output));
    *message = output->flat<uint8_t>().data();
    return absl::OkStatus();
  }

  int64_t bits_, block_;
};

class QuantizeBlocksOp : public BlockOp {
 public:
  explicit QuantizeBlocksOp(OpKernelConstruction* ctx) : BlockOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("clip_value", &clip_value_));
    OP_REQUIRES(ctx, clip_value_ >= 0,
                InvalidArgument("clip_value must be at least 0, received ",
                                clip_value_));
  }

  void Compute(OpKernelContext* ctx) override {
    LockedVariables locked;
    OP_REQUIRES_OK(ctx, Lock(ctx, &locked));
    const Tensor& values = ctx->input(1);
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
    OP_REQUIRES_OK(ctx, CheckLength(values, "values", layout.elements));
    uint8_t* message = nullptr;
    OP_REQUIRES_OK(ctx, AllocateMessage(ctx, layout, &message));
    Tensor* clipped = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(1, TensorShape({}), &clipped));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0));
    float* residual = static_cast<float*>(locked.data(0));
    std::atomic<int64_t> count{0};
    WithBits(layout.bits, [&](auto bits) {
      ForBlocks(ctx, layout, /*cycles_per_element=*/2 * bits,
                [&](int64_t begin, int64_t end) {
                  count += QuantizeBlocks<bits()>(
                      layout, values.flat<float>().data(), clip_value_,
                      residual, message, begin, end);
                });
    });
    clipped->scalar<int64_t>()() = count;
  }

 private:
  float clip_value_;
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
    OP_REQUIRES_OK(ctx, Lock(ctx, &locked));
    const Tensor& messages = ctx->input(1);
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
    OP_REQUIRES_OK(ctx, CheckLength(messages, "messages",
                                    workers_ * layout.message_bytes()));
    uint8_t* message = nullptr;
    OP_REQUIRES_OK(ctx, AllocateMessage(ctx, layout, &message));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0));
    float* residual = static_cast<float*>(locked.data(0));
    WithBits(layout.bits, [&](auto bits) {
      ForBlocks(ctx, layout, /*cycles_per_element=*/(2 + workers_) * bits,
                [&](int64_t begin, int64_t end) {
                  AverageBlocks<bits()>(layout, messages.flat<uint8_t>().data(),
                                        workers_, residual, message, begin,
                                        end);
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
    OP_REQUIRES_OK(ctx,
                   CheckLength(message, "message", layout.message_bytes()));
    Tensor* values = nullptr;
    OP_REQUIRES_OK(ctx,
                   ctx->allocate_output(0, TensorShape({elements}), &values));
    AdviseHugePages(values->data(), values->TotalBytes());
    WithBits(layout.bits, [&](auto bits) {
      ForBlocks(ctx, layout, /*cycles_per_element=*/1,
                [&](int64_t begin, int64_t end) {
                  DequantizeBlocks<bits()>(
                      layout, message.flat<uint8_t>().data(),
                      values->flat<float>().data(), begin, end);
                });
    });
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
REGISTER(CountUnusable);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
