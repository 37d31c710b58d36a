#include <vector>

#include "core/frozen_step.h"
#include "kernels/block_op.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_basis {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

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
    BlockLayout layout;
    OP_REQUIRES_OK(ctx, Lock(ctx, inputs, "first", &locked, &layout));
    OP_REQUIRES_OK(ctx,
                   CheckLength(locked.tensor(1), "second", layout.elements));
    const Tensor& message = ctx->input(2);
    OP_REQUIRES_OK(ctx, CheckMessage(message, layout));
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
    BlockLayout layout;
    OP_REQUIRES_OK(ctx, Lock(ctx, inputs, "first", &locked, &layout));
    OP_REQUIRES_OK(ctx,
                   CheckLength(locked.tensor(1), "second", layout.elements));
    OP_REQUIRES_OK(ctx,
                   CheckLength(locked.tensor(2), "drift", layout.elements));
    Pieces pieces;
    OP_REQUIRES_OK(ctx, TakePieces(values, layout, &pieces));
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

#define REGISTER(Verb)     \
  REGISTER_KERNEL_BUILDER( \
      Name("TfBasis>" #Verb).Device(tensorflow::DEVICE_CPU), Verb##Op)
REGISTER(StepFrozen);
REGISTER(StepLocal);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
