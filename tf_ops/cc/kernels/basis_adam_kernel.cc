#include "core/basis_adam.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_basis {
namespace {

enum class Momentum { kExclusive, kShared, kNone };

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

template <typename Index>
absl::Status CheckRows(const Tensor& indices, int64_t n_rows,
                       const std::string& table_name) {
  const Index* data = indices.flat<Index>().data();
  for (int64_t i = 0; i < indices.NumElements(); ++i) {
    if (data[i] < 0 || data[i] >= n_rows) {
      return InvalidArgument("table '", table_name, "': index ", data[i],
                             " is outside [0, ", n_rows, "), the table has ",
                             n_rows, " rows");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckVariable(const Tensor& tensor, const char* argument,
                           tensorflow::DataType dtype,
                           const TensorShape& shape) {
  if (tensor.dtype() != dtype || tensor.shape() != shape) {
    return InvalidArgument(
        argument, " must be ", tensorflow::DataTypeString(dtype), " of shape ",
        shape.DebugString(), ", received ",
        tensorflow::DataTypeString(tensor.dtype()), " of shape ",
        tensor.shape().DebugString());
  }
  return absl::OkStatus();
}

template <typename Index>
class CheckRowsOp : public OpKernel {
 public:
  explicit CheckRowsOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("n_rows", &n_rows_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_name", &table_name_));
  }

  void Compute(OpKernelContext* ctx) override {
    OP_REQUIRES_OK(ctx, CheckRows<Index>(ctx->input(0), n_rows_, table_name_));
  }

 private:
  int64_t n_rows_;
  std::string table_name_;
};

template <typename Index>
class ApplyBasisAdamOp : public OpKernel {
 public:
  explicit ApplyBasisAdamOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("exclusive_rows", &exclusive_rows_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_name", &table_name_));
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("bias_correction", &rule_.bias_correction));
    GetChoice(ctx, "hashing", HashingChoices(), &hashing_);
    GetSeed(ctx, &seed_);
    GetChoice(ctx, "momentum",
              {{"exclusive", Momentum::kExclusive},
               {"shared", Momentum::kShared},
               {"none", Momentum::kNone}},
              &momentum_);
    GetChoice(ctx, "invariant_scalar",
              {{"energy", RowScalar::kEnergy},
               {"learned", RowScalar::kLearned},
               {"none", RowScalar::kNone}},
              &rule_.scalar);
    GetChoice(ctx, "scalar_rule",
              {{"gradient", ScalarRule::kGradient},
               {"sign", ScalarRule::kSign},
               {"log", ScalarRule::kLog}},
              &rule_.scalar_rule);
    GetChoice(ctx, "collision_reduce",
              {{"mean", CollisionReduce::kMean},
               {"sum", CollisionReduce::kSum},
               {"sequential", CollisionReduce::kSequential}},
              &rule_.reduce);
  }

  void Compute(OpKernelContext* ctx) override {
    OpInputList first_moment, row_scalar;
    OP_REQUIRES_OK(ctx, ctx->input_list("first_moment", &first_moment));
    OP_REQUIRES_OK(ctx, ctx->input_list("row_scalar", &row_scalar));
    const int rest = ctx->num_inputs() - 4;
    const Tensor& indices = ctx->input(rest);
    const Tensor& values = ctx->input(rest + 1);
    BasisAdamRule rule = rule_;
    OP_REQUIRES_OK(ctx, ReadHyperparameters(ctx->input(rest + 2),
                                            ctx->input(rest + 3), &rule));

    std::vector<tensorflow::ResourceHandle> handles;
    for (int i = 0; i < rest; ++i) {
      handles.push_back(tensorflow::HandleFromInput(ctx, i));
    }
    LockedVariables variables;
    OP_REQUIRES_OK(ctx, variables.Lock(ctx, handles));
    BasisAdamState state{};
    int64_t n_rows = 0, num_buckets = 0;
    OP_REQUIRES_OK(ctx, Check(variables, first_moment.size(), row_scalar.size(),
                              indices, values, &state, &n_rows, &num_buckets));

    // Nothing has been written so far, and nothing below can fail but memory.
    for (int i = 0; i < rest; ++i) {
      OP_REQUIRES_OK(ctx, variables.MakeWritable(ctx, i));
    }
    state.table = variables.data<float>(0);
    state.second_moment = variables.data<float>(1);
    state.bucket_steps = variables.data<int32_t>(2);
    state.first_moment =
        first_moment.size() > 0 ? variables.data<float>(3) : nullptr;
    state.row_scalar = row_scalar.size() > 0
                           ? variables.data<float>(3 + first_moment.size())
                           : nullptr;
    const ParallelFor threads = ThreadsOf(ctx);
    const BucketMap bucket_of(n_rows, num_buckets, exclusive_rows_, hashing_,
                              seed_);
    const RowGroups groups =
        GroupRows(indices.flat<Index>().data(), indices.NumElements(), n_rows,
                  num_buckets, bucket_of, threads);
    ApplyBasisAdam(rule, state, groups, values.flat<float>().data(), threads);
  }

 private:
  static absl::Status ReadHyperparameters(const Tensor& learning_rate,
                                          const Tensor& hyperparameters,
                                          BasisAdamRule* rule) {
    constexpr int kCount = 9;
    if (learning_rate.NumElements() != 1) {
      return InvalidArgument("learning_rate must be a scalar, received shape ",
                             learning_rate.shape().DebugString());
    }
    if (hyperparameters.shape() != TensorShape({kCount})) {
      return InvalidArgument("hyperparameters must hold ", kCount,
                             " values, received shape ",
                             hyperparameters.shape().DebugString());
    }
    const double* h = hyperparameters.flat<double>().data();
    rule->learning_rate = learning_rate.flat<double>()(0);
    rule->beta_1 = h[0];
    rule->beta_2 = h[1];
    rule->epsilon = h[2];
    rule->weight_decay = h[3];
    rule->row_clipnorm = h[4];
    rule->scalar_decay = h[5];
    rule->scalar_min = h[6];
    rule->scalar_max = h[7];
    rule->scalar_learning_rate = h[8];
    return absl::OkStatus();
  }

  // Checks ranks, shapes, types and every index; fills the sizes of `state`.
  absl::Status Check(const LockedVariables& variables, int num_first_moment,
                     int num_row_scalar, const Tensor& indices,
                     const Tensor& values, BasisAdamState* state,
                     int64_t* n_rows, int64_t* num_buckets) const {
    const Tensor& table = variables.tensor(0);
    const Tensor& second_moment = variables.tensor(1);
    if (table.dims() != 2 || second_moment.dims() != 2) {
      return InvalidArgument(
          "table and second_moment must have rank 2, received shapes ",
          table.shape().DebugString(), " and ",
          second_moment.shape().DebugString());
    }
    const int64_t n = table.dim_size(0), dim = table.dim_size(1);
    const int64_t buckets = second_moment.dim_size(0);
    if (n < 1 || dim < 1 || buckets < 1 || buckets > n ||
        (buckets < n && exclusive_rows_ >= buckets)) {
      return InvalidArgument(
          "exclusive_rows < second_moment rows <= table rows must hold, "
          "received ",
          exclusive_rows_, ", ", buckets, " and ", n);
    }
    const int64_t owners = buckets == n ? n : exclusive_rows_;
    int64_t moment_rows = momentum_ == Momentum::kExclusive ? owners
                          : momentum_ == Momentum::kShared  ? buckets
                                                                 : 0;
    if (num_first_moment != (moment_rows > 0 ? 1 : 0)) {
      return InvalidArgument("first_moment must hold ", moment_rows > 0 ? 1 : 0,
                             " variables, received ", num_first_moment);
    }
    const int wanted_scalar = rule_.scalar == RowScalar::kNone ? 0 : 1;
    if (num_row_scalar != wanted_scalar) {
      return InvalidArgument("row_scalar must hold ", wanted_scalar,
                             " variables, received ", num_row_scalar);
    }
    using tensorflow::DT_FLOAT;
    TF_RETURN_IF_ERROR(CheckVariable(table, "table", DT_FLOAT, {n, dim}));
    TF_RETURN_IF_ERROR(CheckVariable(second_moment, "second_moment", DT_FLOAT,
                                     {buckets, dim}));
    TF_RETURN_IF_ERROR(CheckVariable(variables.tensor(2), "bucket_steps",
                                     tensorflow::DT_INT32, {buckets}));
    if (num_first_moment > 0) {
      TF_RETURN_IF_ERROR(CheckVariable(variables.tensor(3), "first_moment",
                                       DT_FLOAT, {moment_rows, dim}));
    }
    if (num_row_scalar > 0) {
      TF_RETURN_IF_ERROR(CheckVariable(variables.tensor(3 + num_first_moment),
                                       "row_scalar", DT_FLOAT, {n}));
    }
    if (indices.dims() != 1 ||
        values.shape() != TensorShape({indices.dim_size(0), dim})) {
      return InvalidArgument(
          "values must have one row of ", dim,
          " numbers for each index, received values of shape ",
          values.shape().DebugString(), " and indices of shape ",
          indices.shape().DebugString());
    }
    state->dim = dim;
    state->first_moment_rows = moment_rows;
    state->owners = owners;
    *n_rows = n;
    *num_buckets = buckets;
    return CheckRows<Index>(indices, n, table_name_);
  }

  int64_t exclusive_rows_ = 0;
  std::string table_name_;
  Hashing hashing_ = Hashing::kBalanced;
  uint32_t seed_ = 0;
  Momentum momentum_ = Momentum::kExclusive;
  BasisAdamRule rule_{};
};

#define REGISTER(Index)                                               \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>ApplyBasisAdam")              \
                              .Device(tensorflow::DEVICE_CPU)         \
                              .TypeConstraint<Index>("Tindices"),     \
                          ApplyBasisAdamOp<Index>);                   \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>CheckRows")                   \
                              .Device(tensorflow::DEVICE_CPU)         \
                              .TypeConstraint<Index>("Tindices"),     \
                          CheckRowsOp<Index>)
REGISTER(int32_t);
REGISTER(int64_t);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
