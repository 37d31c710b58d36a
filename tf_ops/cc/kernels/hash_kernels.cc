#include "core/hash.h"

#include "kernels/kernel_util.h"
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
    OP_REQUIRES_OK(ctx, ctx->GetAttr("exclusive_rows", &exclusive_rows_));
    GetChoice(ctx, "hashing", HashingChoices(), &hashing_);
    GetSeed(ctx, &seed_);
    OP_REQUIRES(ctx, num_buckets_ >= n_rows_ || exclusive_rows_ < num_buckets_,
                InvalidArgument(
                    "exclusive_rows must be below num_buckets, received ",
                    exclusive_rows_, " and ", num_buckets_));
  }

  void Compute(OpKernelContext* ctx) override {
    const Tensor& rows = ctx->input(0);
    const T* in = rows.flat<T>().data();
    for (int64_t i = 0; i < rows.NumElements(); ++i) {
      OP_REQUIRES(ctx, in[i] >= 0 && in[i] < n_rows_,
                  InvalidArgument(
                      "rows must be in [0, ", n_rows_, "), received ", in[i]));
    }
    Tensor* buckets = nullptr;
    OP_REQUIRES_OK(ctx, ctx->allocate_output(0, rows.shape(), &buckets));
    int64_t* out = buckets->flat<int64_t>().data();
    const BucketMap bucket_of(n_rows_, num_buckets_, exclusive_rows_, hashing_,
                              seed_);
    ThreadsOf(ctx)(rows.NumElements(), /*cost=*/80,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       out[i] = bucket_of(in[i]);
                     }
                   });
  }

 private:
  int64_t n_rows_, num_buckets_, exclusive_rows_;
  Hashing hashing_ = Hashing::kBalanced;
  uint32_t seed_ = 0;
};

#define REGISTER(T)                                                   \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>HashMurmur3")                 \
                              .Device(tensorflow::DEVICE_CPU)         \
                              .TypeConstraint<T>("T"),                \
                          HashMurmur3Op<T>);                          \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>MapRows")                     \
                              .Device(tensorflow::DEVICE_CPU)         \
                              .TypeConstraint<T>("T"),                \
                          MapRowsOp<T>)
REGISTER(int32_t);
REGISTER(int64_t);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
