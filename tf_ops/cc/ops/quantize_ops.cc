#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status QuantizedShape(InferenceContext* c) {
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  c->set_output(1, c->Scalar());
  return absl::OkStatus();
}

absl::Status AveragedShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  return absl::OkStatus();
}

absl::Status SumsShape(InferenceContext* c) {
  c->set_output(0, c->Vector(3));
  return absl::OkStatus();
}

absl::Status DequantizedShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 0, &unused));
  tensorflow::shape_inference::DimensionHandle elements;
  TF_RETURN_IF_ERROR(c->MakeDimForScalarInput(1, &elements));
  c->set_output(0, c->Vector(elements));
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfBasis>QuantizeBlocks")
    .Input("residual: resource")
    .Input("values: pieces * float")
    .Input("momentum: momenta * resource")
    .Input("scales: given * float")
    .Output("message: uint8")
    .Output("clipped: int64")
    .Attr("pieces: int >= 1")
    .Attr("momenta: int >= 0 = 0")
    .Attr("given: int >= 0 = 0")
    .Attr("keep: float = 0")
    .Attr("take: float = 1")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .Attr("clip_value: float = 0")
    .SetIsStateful()
    .SetShapeFn(QuantizedShape)
    .Doc(R"doc(
The message of u = values + residual; the residual becomes what it does not say.

values are pieces of any shape, one after the other. With a momentum, which is only
read, u = keep * momentum + take * values + residual. With a clip_value above 0, u is
limited to that magnitude; clipped counts how often. bits is 1 or 2, block a multiple
of 8. With scales, as many for each block as there are bits, they are used instead of
those of u.
)doc");

REGISTER_OP("TfBasis>AverageBlocks")
    .Input("residual: resource")
    .Input("messages: uint8")
    .Input("scales: given * float")
    .Output("message: uint8")
    .Attr("workers: int >= 1")
    .Attr("given: int >= 0 = 0")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetIsStateful()
    .SetShapeFn(AveragedShape)
    .Doc(R"doc(
The message of the mean of the workers' messages + residual; the residual becomes
what it does not say. See QuantizeBlocks for scales.
)doc");

REGISTER_OP("TfBasis>MessageStatistics")
    .Input("residual: resource")
    .Input("message: uint8")
    .Output("sums: double")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetIsStateful()
    .SetShapeFn(SumsShape)
    .Doc(R"doc(
Sums over all elements of u, u^2 and (u - q)^2: u - q is the residual that quantising
left, and the message stands for q.
)doc");

REGISTER_OP("TfBasis>DequantizeBlocks")
    .Input("message: uint8")
    .Input("elements: int64")
    .Output("values: float")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetShapeFn(DequantizedShape)
    .Doc("What a message of that many elements stands for.");

REGISTER_OP("TfBasis>DequantizeInto")
    .Input("values: resource")
    .Input("message: uint8")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc("values becomes what the message stands for.");

REGISTER_OP("TfBasis>StepFrozen")
    .Input("first: resource")
    .Input("second: resource")
    .Input("message: uint8")
    .Input("first_scale: float")
    .Input("root_scale: float")
    .Input("decay: float")
    .Input("variables: targets * resource")
    .Attr("targets: int >= 0")
    .Attr("starts: list(int)")
    .Attr("decayed: list(bool)")
    .Attr("epsilon: float")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
first becomes what the message stands for, and moves the variables:

variable -= variable * decay, where decayed; then
variable -= first * first_scale / (sqrt(second) * root_scale + epsilon),
where second > 0.

Each variable has its elements of first and second from its entry of starts on.
)doc");

REGISTER_OP("TfBasis>StepLocal")
    .Input("first: resource")
    .Input("second: resource")
    .Input("drift: resource")
    .Input("values: pieces * float")
    .Input("first_scale: float")
    .Input("root_scale: float")
    .Input("decay: float")
    .Input("variables: targets * resource")
    .Attr("pieces: int >= 1")
    .Attr("targets: int >= 0")
    .Attr("starts: list(int)")
    .Attr("decayed: list(bool)")
    .Attr("epsilon: float")
    .Attr("keep: float")
    .Attr("take: float")
    .Attr("bits: int >= 1 = 1")
    .Attr("block: int >= 8")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
first becomes keep * first + take * values, drift grows by first * first_scale, and the
variables move as in StepFrozen.
)doc");

REGISTER_OP("TfBasis>CountUnusable")
    .Input("values: float")
    .Output("count: int64")
    .Attr("limit: float")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("How many values are NaN or of a magnitude above the limit.");
