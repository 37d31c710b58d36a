#include <string>
#include <utility>
#include <vector>

#include "core/table_update.h"
#include "kernels/kernel_util.h"
#include "kernels/mapping.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tf_basis {
namespace {

using tensorflow::DataType;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

enum class Momentum { kExclusive, kShared, kNone };

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

absl::Status FormatOf(const Tensor& tensor, const char* argument, bool log8,
                      Format* format) {
  switch (tensor.dtype()) {
    case tensorflow::DT_FLOAT:
      *format = Format::kFloat32;
      return absl::OkStatus();
    case tensorflow::DT_BFLOAT16:
      *format = Format::kBfloat16;
      return absl::OkStatus();
    case tensorflow::DT_HALF:
      *format = Format::kFloat16;
      return absl::OkStatus();
    case tensorflow::DT_UINT8:
      *format = Format::kLog8;
      if (log8) return absl::OkStatus();
      break;
    default:
      break;
  }
  return InvalidArgument(argument, " cannot be ",
                         tensorflow::DataTypeString(tensor.dtype()));
}

absl::Status CheckShape(const Tensor& tensor, const char* argument,
                        const TensorShape& shape) {
  if (tensor.shape() == shape) return absl::OkStatus();
  return InvalidArgument(argument, " must have the shape ", shape.DebugString(),
                         ", received ", tensor.shape().DebugString());
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

// The variables of one step, where they are among the inputs, and what they
// are.
struct Variables {
  enum Slot {
    kTable,
    kSteps,
    kSecond,
    kFirst,
    kScalar,
    kRowSteps,
    kLast,
    kLeader,
    kVotes,
    kLeaderSteps,
    kSlots
  };
  int at[kSlots];  // position among the locked variables, -1: none
  LockedVariables locked;

  bool has(Slot slot) const { return at[slot] >= 0; }
  const Tensor& tensor(Slot slot) const { return locked.tensor(at[slot]); }
  void* data(Slot slot) { return has(slot) ? locked.data(at[slot]) : nullptr; }
};

template <typename Index>
class UpdateTableOp : public OpKernel {
 public:
  explicit UpdateTableOp(OpKernelConstruction* ctx) : OpKernel(ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("table_name", &table_name_));
    OP_REQUIRES_OK(ctx,
                   ctx->GetAttr("bias_correction", &rule_.bias_correction));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("nesterov", &rule_.nesterov));
    mapping_.Read(ctx);
    rule_.seed = mapping_.seed();
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
    const int first_plain = ctx->num_inputs() - 7;
    const Tensor& indices = ctx->input(first_plain);
    const Tensor& values = ctx->input(first_plain + 1);
    BucketRule rule = rule_;
    OP_REQUIRES_OK(ctx, ReadNumbers(ctx, first_plain + 2, &rule));

    Variables variables;
    OP_REQUIRES_OK(ctx, Lock(ctx, &variables));
    TableState state;
    RowMapping mapping;
    Format formats[Variables::kSlots] = {};
    OP_REQUIRES_OK(
        ctx, Check(variables, indices, values, ctx->input(first_plain + 5),
                   ctx->input(first_plain + 6), &state, &mapping, formats));

    // Nothing has been written so far, and nothing below can fail but memory.
    for (int slot = 0; slot < Variables::kSlots; ++slot) {
      if (variables.at[slot] < 0) continue;
      OP_REQUIRES_OK(ctx,
                     variables.locked.MakeWritable(ctx, variables.at[slot]));
    }
    using V = Variables;
    const auto rows = [&](V::Slot slot) {
      return Rows(variables.data(slot), formats[slot], state.dim);
    };
    state.table = rows(V::kTable);
    state.first_moment = rows(V::kFirst);
    state.second_moment = rows(V::kSecond);
    state.row_scalar = Numbers(variables.data(V::kScalar), formats[V::kScalar]);
    state.bucket_steps = static_cast<int32_t*>(variables.data(V::kSteps));
    state.last_step = static_cast<int32_t*>(variables.data(V::kLast));
    state.row_steps = static_cast<int32_t*>(variables.data(V::kRowSteps));
    state.leader = static_cast<int64_t*>(variables.data(V::kLeader));
    state.leader_votes = static_cast<int32_t*>(variables.data(V::kVotes));
    state.leader_steps = static_cast<int32_t*>(variables.data(V::kLeaderSteps));

    const ParallelFor threads = ThreadsOf(ctx);
    const BucketMap buckets_of(mapping);
    const RowGroups groups =
        GroupRows(indices.flat<Index>().data(), indices.NumElements(),
                  mapping.n_rows, mapping.num_buckets, buckets_of, threads);
    UpdateTable(rule, state, groups, values.flat<float>().data(),
                mapping_.two_buckets(), threads);
  }

 private:
  static absl::Status ReadNumbers(OpKernelContext* ctx, int first,
                                  BucketRule* rule) {
    constexpr int kCount = 13;
    const Tensor& hyperparameters = ctx->input(first + 2);
    if (ctx->input(first).NumElements() != 1 ||
        ctx->input(first + 1).NumElements() != 1 ||
        hyperparameters.shape() != TensorShape({kCount})) {
      return InvalidArgument(
          "learning_rate and step must be scalars and hyperparameters hold ",
          kCount, " values, received shapes ",
          ctx->input(first).shape().DebugString(), ", ",
          ctx->input(first + 1).shape().DebugString(), " and ",
          hyperparameters.shape().DebugString());
    }
    rule->learning_rate = ctx->input(first).flat<double>()(0);
    rule->step = ctx->input(first + 1).flat<int64_t>()(0);
    const double* h = hyperparameters.flat<double>().data();
    rule->first_keep = h[0];
    rule->first_take = h[1];
    rule->second_keep = h[2];
    rule->second_take = h[3];
    rule->energy_keep = h[4];
    rule->energy_take = h[5];
    rule->epsilon = h[6];
    rule->weight_decay = h[7];
    rule->row_clipnorm = h[8];
    rule->scalar_min = h[9];
    rule->scalar_max = h[10];
    rule->scalar_learning_rate = h[11];
    rule->frequency_power = h[12];
    return absl::OkStatus();
  }

  static absl::Status Lock(OpKernelContext* ctx, Variables* variables) {
    static constexpr const char* kNames[] = {
        "table",        "bucket_steps", "second_moment", "first_moment",
        "row_scalar",   "row_steps",    "last_step",     "leader",
        "leader_votes", "leader_steps"};
    std::vector<tensorflow::ResourceHandle> handles;
    for (int slot = 0; slot < Variables::kSlots; ++slot) {
      tensorflow::OpInputList list;
      TF_RETURN_IF_ERROR(ctx->input_list(kNames[slot], &list));
      if (list.size() > 1) {
        return InvalidArgument(kNames[slot], " must hold at most 1 variable, ",
                               "received ", list.size());
      }
      variables->at[slot] =
          list.size() == 0 ? -1 : static_cast<int>(handles.size());
      if (list.size() == 0) continue;
      if (list[0].NumElements() != 1) {
        return InvalidArgument(kNames[slot], " must be one variable");
      }
      handles.push_back(list[0].flat<tensorflow::ResourceHandle>()(0));
    }
    return variables->locked.Lock(ctx, handles);
  }

  // Checks ranks, shapes, types and every index; fills the sizes of `state`.
  absl::Status Check(const Variables& variables, const Tensor& indices,
                     const Tensor& values, const Tensor& owner_rows,
                     const Tensor& owner_buckets, TableState* state,
                     RowMapping* mapping, Format* formats) const {
    using V = Variables;
    const Tensor& table = variables.tensor(V::kTable);
    const Tensor& steps = variables.tensor(V::kSteps);
    if (table.dims() != 2 || steps.dims() != 1 || table.dim_size(1) < 1) {
      return InvalidArgument(
          "table must have rank 2 and bucket_steps rank 1, received shapes ",
          table.shape().DebugString(), " and ", steps.shape().DebugString());
    }
    for (int slot = V::kSteps; slot < V::kSlots; ++slot) {
      if (variables.at[slot] < 0) continue;
      const Tensor& tensor = variables.tensor(static_cast<V::Slot>(slot));
      if (tensor.dims() == 0 || tensor.dim_size(0) > 0) continue;
      // resize and grow_rows leave the variables that they replace like this.
      return InvalidArgument("table '", table_name_,
                             "' was resized or got rows after this function "
                             "had been traced: trace "
                             "it anew, with tf_basis.retrace(model) where the "
                             "function is Keras's");
    }
    const int64_t n_rows = table.dim_size(0), dim = table.dim_size(1);
    const int64_t buckets = steps.dim_size(0);
    TF_RETURN_IF_ERROR(
        mapping_.Mapping(n_rows, buckets, owner_rows, owner_buckets, mapping));
    const int64_t owners = mapping->owners();
    const bool led = variables.has(V::kLeader);
    if (led && (owners != 0 || mapping_.two_buckets() ||
                momentum_ == Momentum::kShared ||
                rule_.scalar == RowScalar::kLearned)) {
      return InvalidArgument(
          "leader needs exclusive_rows 0, fewer buckets than rows, one bucket "
          "a "
          "row, no shared momentum and no learned scalar");
    }
    const int64_t moment_rows = momentum_ == Momentum::kExclusive
                                    ? (led ? buckets : owners)
                                : momentum_ == Momentum::kShared ? buckets
                                                                 : 0;
    const bool energy = rule_.scalar == RowScalar::kEnergy;
    if (variables.has(V::kFirst) != (moment_rows > 0) ||
        variables.has(V::kScalar) != (rule_.scalar != RowScalar::kNone) ||
        (energy && !variables.has(V::kSecond)) ||
        (variables.has(V::kRowSteps) && rule_.scalar != RowScalar::kLearned)) {
      return InvalidArgument(
          "the lists of variables do not fit momentum and invariant_scalar: ",
          "first_moment must hold ", moment_rows > 0 ? 1 : 0, ", row_scalar ",
          rule_.scalar != RowScalar::kNone ? 1 : 0, ", received ",
          variables.has(V::kFirst) ? 1 : 0, " and ",
          variables.has(V::kScalar) ? 1 : 0);
    }
    const std::pair<V::Slot, const char*> matrices[] = {
        {V::kTable, "table"},
        {V::kSecond, "second_moment"},
        {V::kFirst, "first_moment"},
        {V::kScalar, "row_scalar"}};
    for (const auto& [slot, name] : matrices) {
      if (!variables.has(slot)) continue;
      TF_RETURN_IF_ERROR(FormatOf(variables.tensor(slot), name,
                                  slot == V::kScalar && energy,
                                  &formats[slot]));
      const TensorShape shape =
          slot == V::kTable    ? TensorShape({n_rows, dim})
          : slot == V::kSecond ? TensorShape({buckets, dim})
          : slot == V::kFirst  ? TensorShape({moment_rows, dim})
                               : TensorShape({n_rows});
      TF_RETURN_IF_ERROR(CheckShape(variables.tensor(slot), name, shape));
    }
    const std::pair<V::Slot, const char*> counters[] = {
        {V::kSteps, "bucket_steps"}, {V::kRowSteps, "row_steps"},
        {V::kLast, "last_step"},     {V::kLeader, "leader"},
        {V::kVotes, "leader_votes"}, {V::kLeaderSteps, "leader_steps"}};
    for (const auto& [slot, name] : counters) {
      if (!variables.has(slot)) continue;
      const Tensor& tensor = variables.tensor(slot);
      const DataType dtype =
          slot == V::kLeader ? tensorflow::DT_INT64 : tensorflow::DT_INT32;
      if (tensor.dtype() != dtype) {
        return InvalidArgument(name, " must be ",
                               tensorflow::DataTypeString(dtype), ", received ",
                               tensorflow::DataTypeString(tensor.dtype()));
      }
      TF_RETURN_IF_ERROR(
          CheckShape(tensor, name,
                     TensorShape({slot == V::kRowSteps ? n_rows : buckets})));
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
    state->owners = owners;
    state->first_moment_rows = moment_rows;
    return CheckRows<Index>(indices, n_rows, table_name_);
  }

  std::string table_name_;
  MappingAttributes mapping_;
  Momentum momentum_ = Momentum::kExclusive;
  BucketRule rule_;
};

#define REGISTER(Index)                                           \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>UpdateTable")             \
                              .Device(tensorflow::DEVICE_CPU)     \
                              .TypeConstraint<Index>("Tindices"), \
                          UpdateTableOp<Index>);                  \
  REGISTER_KERNEL_BUILDER(Name("TfBasis>CheckRows")               \
                              .Device(tensorflow::DEVICE_CPU)     \
                              .TypeConstraint<Index>("Tindices"), \
                          CheckRowsOp<Index>)
REGISTER(int32_t);
REGISTER(int64_t);
#undef REGISTER

}  // namespace
}  // namespace tf_basis
