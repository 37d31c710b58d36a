#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status ApplyBasisAdamShape(InferenceContext* c) {
  ShapeHandle indices, values, scalar, hyperparameters;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 4), 1, &indices));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 3), 2, &values));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(c->num_inputs() - 2), 0, &scalar));
  TF_RETURN_IF_ERROR(
      c->WithRank(c->input(c->num_inputs() - 1), 1, &hyperparameters));
  tensorflow::shape_inference::DimensionHandle n;
  return c->Merge(c->Dim(indices, 0), c->Dim(values, 0), &n);
}

}  // namespace

REGISTER_OP("TfBasis>ApplyBasisAdam")
    .Input("table: resource")
    .Input("second_moment: resource")
    .Input("bucket_steps: resource")
    .Input("first_moment: num_first_moment * resource")
    .Input("row_scalar: num_row_scalar * resource")
    .Input("indices: Tindices")
    .Input("values: float")
    .Input("learning_rate: double")
    .Input("hyperparameters: double")
    .Attr("num_first_moment: int >= 0")
    .Attr("num_row_scalar: int >= 0")
    .Attr("Tindices: {int32, int64}")
    .Attr("exclusive_rows: int >= 0 = 0")
    .Attr("hashing: {'balanced', 'murmur3'} = 'balanced'")
    .Attr("seed: int = 0")
    .Attr("momentum: {'exclusive', 'shared', 'none'} = 'exclusive'")
    .Attr("invariant_scalar: {'energy', 'learned', 'none'} = 'energy'")
    .Attr("scalar_rule: {'gradient', 'sign', 'log'} = 'gradient'")
    .Attr("collision_reduce: {'mean', 'sum', 'sequential'} = 'mean'")
    .Attr("bias_correction: bool = true")
    .Attr("table_name: string = ''")
    .SetIsStateful()
    .SetShapeFn(ApplyBasisAdamShape)
    .Doc(R"doc(
One BasisAdam step on the rows of a table that a batch touched, in place.

first_moment and row_scalar are lists of no or one variable: the modes that do
not use them have none. hyperparameters holds, in this order, beta_1, beta_2,
epsilon, weight_decay, row_clipnorm (0: off), scalar_decay, the two ends of
scalar_range, and scalar_learning_rate.
)doc");

REGISTER_OP("TfBasis>CheckRows")
    .Input("indices: Tindices")
    .Attr("Tindices: {int32, int64}")
    .Attr("n_rows: int >= 1")
    .Attr("table_name: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("Fails, naming the table, where an index is outside [0, n_rows).");
