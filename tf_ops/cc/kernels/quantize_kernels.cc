#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

#include "core/block_quantize.h"
#include "core/frozen_step.h"
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

  // The variables of these inputs, locked; not yet writable.
  static absl::Status Lock(OpKernelContext* ctx, const std::vector<int>& inputs,
                           LockedVariables* locked) {
    std::vector<tensorflow::ResourceHandle> handles;
    for (const int i : inputs) {
      if (ctx->input(i).NumElements() != 1) {
        return InvalidArgument("input ", i,
                               " must be one variable, received shape ",
                               ctx->input(i).shape().DebugString());
      }
      handles.push_back(ctx->input(i).scalar<tensorflow::ResourceHandle>()());
    }
    TF_RETURN_IF_ERROR(locked->Lock(ctx, handles));
    for (size_t i = 0; i < handles.size(); ++i) {
      const Tensor& tensor = locked->tensor(i);
      if (tensor.dtype() != tensorflow::DT_FLOAT) {
        return InvalidArgument("variable ", handles[i].name(),
                               " must be float, received ",
                               tensorflow::DataTypeString(tensor.dtype()));
      }
    }
    return absl::OkStatus();
  }

  static absl::Status CheckVector(const Tensor& tensor, const char* name) {
    if (tensor.dims() == 1) return absl::OkStatus();
    return InvalidArgument(name, " must be of rank 1, received ",
                           tensor.shape().DebugString());
  }

  // The scales of a list of none or one tensor; null for none.
  static absl::Status GivenScales(OpKernelContext* ctx,
                                  const BlockLayout& layout,
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

  static absl::Status AllocateMessage(OpKernelContext* ctx,
                                      const BlockLayout& layout,
                                      uint8_t** message) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(ctx->allocate_output(
        0, TensorShape({layout.message_bytes()}), &output));
    *message = output->flat<uint8_t>().data();
    return absl::OkStatus();
  }

  static void Decode(OpKernelContext* ctx, const BlockLayout& layout,
                     const Tensor& message, float* values) {
    WithBits(layout.bits, [&](auto bits) {
      ForBlocks(ctx, layout, /*cycles_per_element=*/1,
                [&](int64_t begin, int64_t end) {
                  DequantizeBlocks<bits()>(layout,
                                           message.flat<uint8_t>().data(),
                                           values, begin, end);
                });
    });
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
    OP_REQUIRES_OK(ctx, Lock(ctx, inputs, &locked));
    OP_REQUIRES_OK(ctx, CheckVector(locked.tensor(0), "residual"));
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
    Intake intake;
    for (const Tensor& piece : values) {
      intake.values.Add(piece.flat<float>().data(), piece.NumElements());
    }
    OP_REQUIRES(
        ctx, intake.values.elements() == layout.elements,
        InvalidArgument("values must have ", layout.elements,
                        " elements, received ", intake.values.elements()));
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
    OP_REQUIRES_OK(ctx, Lock(ctx, {0}, &locked));
    OP_REQUIRES_OK(ctx, CheckVector(locked.tensor(0), "residual"));
    const Tensor& messages = ctx->input(1);
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
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
    OP_REQUIRES_OK(ctx,
                   CheckLength(message, "message", layout.message_bytes()));
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
    OP_REQUIRES_OK(ctx, Lock(ctx, {0}, &locked));
    OP_REQUIRES_OK(ctx, CheckVector(locked.tensor(0), "values"));
    const Tensor& message = ctx->input(1);
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
    OP_REQUIRES_OK(ctx,
                   CheckLength(message, "message", layout.message_bytes()));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0, /*share_reads=*/true));
    Decode(ctx, layout, message, static_cast<float*>(locked.data(0)));
  }
};

class MessageStatisticsOp : public BlockOp {
 public:
  using BlockOp::BlockOp;

  void Compute(OpKernelContext* ctx) override {
    LockedVariables locked;
    OP_REQUIRES_OK(ctx, Lock(ctx, {0}, &locked));
    OP_REQUIRES_OK(ctx, CheckVector(locked.tensor(0), "residual"));
    const Tensor& message = ctx->input(1);
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
    OP_REQUIRES_OK(ctx,
                   CheckLength(message, "message", layout.message_bytes()));
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

// What ops have that move variables by a flat momentum.
class StepOp : public BlockOp {
 public:
  explicit StepOp(OpKernelConstruction* ctx) : BlockOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("epsilon", &epsilon_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("starts", &starts_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("decayed", &decayed_));
    int64_t targets;
    OP_REQUIRES_OK(ctx, ctx->GetAttr("targets", &targets));
    OP_REQUIRES(ctx,
                static_cast<int64_t>(starts_.size()) == targets &&
                    static_cast<int64_t>(decayed_.size()) == targets,
                InvalidArgument("starts and decayed must have ", targets,
                                " entries, received ", starts_.size(), " and ",
                                decayed_.size()));
  }

 protected:
  // Reads the scalars, inputs `first_input` and the two after it.
  absl::Status Scalars(OpKernelContext* ctx, int first_input,
                       FrozenStep* step) const {
    float scalars[3];
    for (int i = 0; i < 3; ++i) {
      const Tensor& scalar = ctx->input(first_input + i);
      if (scalar.dims() != 0) {
        return InvalidArgument("input ", first_input + i,
                               " must be a scalar, received shape ",
                               scalar.shape().DebugString());
      }
      scalars[i] = scalar.scalar<float>()();
    }
    *step = {scalars[0], scalars[1], epsilon_, scalars[2]};
    return absl::OkStatus();
  }

  // The targets, which are the locked variables from `first_locked` on; they
  // are not writable yet.
  absl::Status Targets(const BlockLayout& layout, LockedVariables& locked,
                       int first_locked, std::vector<Target>* targets) const {
    int64_t reached = 0;
    for (size_t i = 0; i < starts_.size(); ++i) {
      const int64_t count = locked.tensor(first_locked + i).NumElements();
      if (starts_[i] < reached || count > layout.elements - starts_[i]) {
        return InvalidArgument("starts must leave each variable room in ",
                               layout.elements, " elements, received ",
                               starts_[i], " for ", count, " elements after ",
                               reached);
      }
      reached = starts_[i] + count;
      targets->push_back({starts_[i], count, nullptr, decayed_[i]});
    }
    return absl::OkStatus();
  }

  static absl::Status MakeWritable(OpKernelContext* ctx,
                                   LockedVariables* locked, int first_locked,
                                   std::vector<Target>* targets) {
    for (size_t i = 0; i < targets->size(); ++i) {
      const int place = first_locked + static_cast<int>(i);
      TF_RETURN_IF_ERROR(
          locked->MakeWritable(ctx, place, /*share_reads=*/true));
      (*targets)[i].values = static_cast<float*>(locked->data(place));
    }
    return absl::OkStatus();
  }

  float epsilon_;
  std::vector<int64_t> starts_;
  std::vector<bool> decayed_;
};

class StepFrozenOp : public StepOp {
 public:
  using StepOp::StepOp;

  void Compute(OpKernelContext* ctx) override {
    std::vector<int> inputs = {0, 1};
    for (size_t i = 0; i < starts_.size(); ++i) inputs.push_back(6 + i);
    LockedVariables locked;
    OP_REQUIRES_OK(ctx, Lock(ctx, inputs, &locked));
    OP_REQUIRES_OK(ctx, CheckVector(locked.tensor(0), "first"));
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
    OP_REQUIRES_OK(ctx,
                   CheckLength(locked.tensor(1), "second", layout.elements));
    const Tensor& message = ctx->input(2);
    OP_REQUIRES_OK(ctx,
                   CheckLength(message, "message", layout.message_bytes()));
    FrozenStep step;
    OP_REQUIRES_OK(ctx, Scalars(ctx, 3, &step));
    std::vector<Target> targets;
    OP_REQUIRES_OK(ctx, Targets(layout, locked, 2, &targets));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0));
    OP_REQUIRES_OK(ctx, MakeWritable(ctx, &locked, 2, &targets));
    float* first = static_cast<float*>(locked.data(0));
    const float* second = static_cast<const float*>(locked.data(1));
    WithBits(layout.bits, [&](auto bits) {
      ForBlocks(ctx, layout, /*cycles_per_element=*/4,
                [&](int64_t begin, int64_t end) {
                  StepBlocks<bits()>(layout, step,
                                     message.flat<uint8_t>().data(), first,
                                     second, targets, begin, end);
                });
    });
  }
};

class StepLocalOp : public StepOp {
 public:
  explicit StepLocalOp(OpKernelConstruction* ctx) : StepOp(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("keep", &keep_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("take", &take_));
  }

  void Compute(OpKernelContext* ctx) override {
    tensorflow::OpInputList values;
    OP_REQUIRES_OK(ctx, ctx->input_list("values", &values));
    std::vector<int> inputs = {0, 1, 2};
    for (size_t i = 0; i < starts_.size(); ++i) {
      inputs.push_back(6 + values.size() + i);
    }
    LockedVariables locked;
    OP_REQUIRES_OK(ctx, Lock(ctx, inputs, &locked));
    OP_REQUIRES_OK(ctx, CheckVector(locked.tensor(0), "first"));
    const BlockLayout layout = Layout(locked.tensor(0).NumElements());
    OP_REQUIRES_OK(ctx,
                   CheckLength(locked.tensor(1), "second", layout.elements));
    OP_REQUIRES_OK(ctx,
                   CheckLength(locked.tensor(2), "drift", layout.elements));
    Pieces pieces;
    for (const Tensor& piece : values) {
      pieces.Add(piece.flat<float>().data(), piece.NumElements());
    }
    OP_REQUIRES(ctx, pieces.elements() == layout.elements,
                InvalidArgument("values must have ", layout.elements,
                                " elements, received ", pieces.elements()));
    LocalStep step = {{}, keep_, take_};
    OP_REQUIRES_OK(ctx, Scalars(ctx, 3 + values.size(), &step.move));
    std::vector<Target> targets;
    OP_REQUIRES_OK(ctx, Targets(layout, locked, 3, &targets));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 0));
    OP_REQUIRES_OK(ctx, locked.MakeWritable(ctx, 2));
    OP_REQUIRES_OK(ctx, MakeWritable(ctx, &locked, 3, &targets));
    float* first = static_cast<float*>(locked.data(0));
    const float* second = static_cast<const float*>(locked.data(1));
    float* drift = static_cast<float*>(locked.data(2));
    ForBlocks(ctx, layout, /*cycles_per_element=*/4,
              [&](int64_t begin, int64_t end) {
                StepAlone(layout, step, pieces, first, second, drift, targets,
                          begin, end);
              });
  }

 private:
  float keep_, take_;
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
REGISTER(StepFrozen);
REGISTER(StepLocal);
REGISTER(CountUnusable);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
