#include "core/hash.h"
#include "kernels/kernel_util.h"
#include "kernels/mapping.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_basis {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <typename T>
class HashMurmur3Op : public OpKernel {
 public:
  explicit HashMurmur3Op(OpKernelConstruction* ctx) : OpKernel(ctx) {
    GetSeed(ctx, &seed_);
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& ids = ctx->input(0);
    Tensor* hashes = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, ids.shape(), &hashes));
    const T* in = ids.flat<T>().data();
    uint32_t* out = hashes->flat<uint32_t>().data();
    ThreadsOf(ctx)(ids.NumElements(), /*cost=*/20,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       out[i] = Murmur3(in[i], seed_);
                     }
                   });
  }

 private:
  uint32_t seed_ = 0;
};

template <typename T>
class MapRowsOp : public OpKernel {
 public:
  explicit MapRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("n_rows", &n_rows_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("num_buckets", &num_buckets_));
    mapping_.Read(ctx);
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& rows = ctx->input(0);
    RowMapping mapping;
    OP_REQUIRES_OK(ctx, mapping_.Mapping(n_rows_, num_buckets_, ctx->input(1),
                                         ctx->input(2), &mapping));
    const T* in = rows.flat<T>().data();
    for (int64_t i = 0; i < rows.NumElements(); ++i) {
      OP_REQUIRES(ctx, in[i] >= 0 && in[i] < n_rows_,
                  InvalidArgument("rows must be in [0, ", n_rows_,
                                  "), received ", in[i]));
    }
    const bool two = mapping_.two_buckets();
    tensorflow::TensorShape shape = rows.shape();
    if (two) shape.AddDim(2);
    Tensor* buckets = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, shape, &buckets));
    int64_t* out = buckets->flat<int64_t>().data();
    const BucketMap buckets_of(mapping);
    ThreadsOf(ctx)(rows.NumElements(), /*cost=*/80,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       int64_t found[2];
                       const int count = buckets_of(in[i], found);
                       out[two ? 2 * i : i] = found[0];
                       if (two) out[2 * i + 1] = found[count - 1];
                     }
                   });
  }

 private:
  int64_t n_rows_, num_buckets_;
  MappingAttributes mapping_;
};

#define REGISTER(T)                                           \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>HashMurmur3")         \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          HashMurmur3Op<T>);                  \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>MapRows")             \
                              .Device(tensorflow::DEVICE_CPU) \
                              .TypeConstraint<T>("T"),        \
                          MapRowsOp<T>)
REGISTER(int32_t);
REGISTER(int64_t);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
