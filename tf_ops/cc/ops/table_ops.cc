#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status UpdateTableShape(InferenceContext* c) {
  constexpr int kRanks[] = {1, 2, 0, 0,
                            1, 1, 1};  // of the inputs from indices on
  constexpr int kCount = sizeof(kRanks) / sizeof(kRanks[0]);
  ShapeHandle shapes[kCount];
  for (int i = 0; i < kCount; ++i) {
    const int input = c->num_inputs() - kCount + i;
    TF_RETURN_IF_ERROR(c->WithRank(c->input(input), kRanks[i], &shapes[i]));
  }
  tensorflow::shape_inference::DimensionHandle n;
  return c->Merge(c->Dim(shapes[0], 0), c->Dim(shapes[1], 0), &n);
}

}  // namespace

REGISTER_OP("TfBasis>UpdateTable")
    .Input("table: resource")
    .Input("bucket_steps: resource")
    .Input("second_moment: num_second_moment * resource")
    .Input("first_moment: num_first_moment * resource")
    .Input("row_scalar: num_row_scalar * resource")
    .Input("row_steps: num_row_steps * resource")
    .Input("last_step: num_last_step * resource")
    .Input("leader: num_leader * resource")
    .Input("leader_votes: num_leader * resource")
    .Input("leader_steps: num_leader * resource")
    .Input("indices: Tindices")
    .Input("values: float")
    .Input("learning_rate: double")
    .Input("step: int64")
    .Input("hyperparameters: double")
    .Input("owner_rows: int64")
    .Input("owner_buckets: int64")
    .Attr("num_second_moment: int >= 0")
    .Attr("num_first_moment: int >= 0")
    .Attr("num_row_scalar: int >= 0")
    .Attr("num_row_steps: int >= 0")
    .Attr("num_last_step: int >= 0")
    .Attr("num_leader: int >= 0")
    .Attr("Tindices: {int32, int64}")
    .Attr("exclusive_rows: int >= 0 = 0")
    .Attr("hashing: {'balanced', 'murmur3', 'double', 'consistent'}")
    .Attr("seed: int = 0")
    .Attr("domains: list(int) = []")
    .Attr("momentum: {'exclusive', 'shared', 'none'}")
    .Attr("invariant_scalar: {'energy', 'learned', 'none'}")
    .Attr("scalar_rule: {'gradient', 'sign', 'log'} = 'gradient'")
    .Attr("collision_reduce: {'mean', 'sum', 'sequential'} = 'mean'")
    .Attr("bias_correction: bool")
    .Attr("nesterov: bool = false")
    .Attr("table_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(UpdateTableShape)
    .Doc(R"doc(
One step on the rows of a table that a batch touched, in place.

The lists hold no or one variable: a rule that does not use it has none. `step`
counts the optimizer's steps from 1 and matters where there is a last_step.
hyperparameters holds, in this order: keep and take of the first moment, of the
second moment and of the row energies; epsilon; weight_decay (0: off);
row_clipnorm (0: off); the two ends of scalar_range; scalar_learning_rate;
scalar_frequency_power.
)doc");

REGISTER_OP("TfBasis>CheckRows")
    .Input("indices: Tindices")
    .Attr("Tindices: {int32, int64}")
    .Attr("n_rows: int >= 1")
    .Attr("table_name: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Fails, naming the table, where an index is outside [0, n_rows).");
