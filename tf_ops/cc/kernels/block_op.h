// What ops on vectors that are cut into blocks have: the form of a block, the
// variables they lock, and the blocks shared out among threads.
#ifndef TF_BASIS_KERNELS_BLOCK_OP_H_
#define TF_BASIS_KERNELS_BLOCK_OP_H_

#include <algorithm>
#include <functional>
#include <type_traits>
#include <vector>

#include "core/block_quantize.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/denormal.h"

namespace tf_basis {

// Reads the attributes that say what a block is.
inline absl::Status GetBlockForm(tensorflow::OpKernelConstruction* ctx,
                                 int64_t* bits, int64_t* block) {
  TF_RETURN_IF_ERROR(ctx->GetAttr("bits", bits));
  TF_RETURN_IF_ERROR(ctx->GetAttr("block", block));
  if (*bits != 1 && *bits != 2) {
    return InvalidArgument("bits must be 1 or 2, received ", *bits);
  }
  if (*block < 8 || *block % 8 != 0) {
    return InvalidArgument("block must be a multiple of 8, received ", *block);
  }
  return absl::OkStatus();
}

inline absl::Status CheckLength(const tensorflow::Tensor& tensor,
                                const char* name, int64_t length) {
  if (tensor.shape() == tensorflow::TensorShape({length})) {
    return absl::OkStatus();
  }
  return InvalidArgument(name, " must have the shape [", length, "], received ",
                         tensor.shape().DebugString());
}

// Calls work(begin, end) over the blocks on the threads of the device. Those
// take denormal numbers for zero; the calling thread, which works too, need
// not.
inline void ForBlocks(tensorflow::OpKernelContext* ctx,
                      const BlockLayout& layout, int64_t cycles_per_element,
                      const std::function<void(int64_t, int64_t)>& work) {
  const int64_t longest = std::min(layout.block, layout.elements);
  ThreadsOf(ctx)(layout.blocks(), longest * cycles_per_element,
                 [&](int64_t begin, int64_t end) {
                   const tensorflow::port::ScopedFlushDenormal flush;
                   work(begin, end);
                 });
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
class BlockOp : public tensorflow::OpKernel {
 public:
  explicit BlockOp(tensorflow::OpKernelConstruction* ctx)
      : tensorflow::OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, GetBlockForm(ctx, &bits_, &block_));
  }

 protected:
  BlockLayout Layout(int64_t elements) const {
    return {elements, block_, static_cast<int>(bits_)};
  }

  // The variables of these inputs, locked; not yet writable. The first is the
  // vector whose blocks they are, called `name`.
  absl::Status Lock(tensorflow::OpKernelContext* ctx,
                    const std::vector<int>& inputs, const char* name,
                    LockedVariables* locked, BlockLayout* layout) const {
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
      const tensorflow::Tensor& tensor = locked->tensor(i);
      if (tensor.dtype() != tensorflow::DT_FLOAT) {
        return InvalidArgument("variable ", handles[i].name(),
                               " must be float, received ",
                               tensorflow::DataTypeString(tensor.dtype()));
      }
    }
    const tensorflow::Tensor& first = locked->tensor(0);
    if (first.dims() != 1) {
      return InvalidArgument(name, " must be of rank 1, received ",
                             first.shape().DebugString());
    }
    *layout = Layout(first.NumElements());
    return absl::OkStatus();
  }

  static absl::Status CheckMessage(const tensorflow::Tensor& message,
                                   const BlockLayout& layout) {
    return CheckLength(message, "message", layout.message_bytes());
  }

  // The tensors of a list, one after the other, as many elements as the vector.
  static absl::Status TakePieces(const tensorflow::OpInputList& values,
                                 const BlockLayout& layout, Pieces* pieces) {
    for (const tensorflow::Tensor& piece : values) {
      pieces->Add(piece.flat<float>().data(), piece.NumElements());
    }
    if (pieces->elements() == layout.elements) return absl::OkStatus();
    return InvalidArgument("values must have ", layout.elements,
                           " elements, received ", pieces->elements());
  }

  int64_t bits_, block_;
};

}  // namespace tf_basis

#endif  // TF_BASIS_KERNELS_BLOCK_OP_H_
