#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

// A resource, a vector; a vector of unknown length, then scalars.
absl::Status MessageShape(InferenceContext* c) {
  ShapeHandle unused;
  TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 0, &unused));
  TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
  c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
  for (int i = 1; i < c->num_outputs(); ++i) c->set_output(i, c->Scalar());
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
    .Input("values: float")
    .Output("message: uint8")
    .Output("clipped: int64")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .Attr("clip_value: float = 0")
    .SetIsStateful()
    .SetShapeFn(MessageShape)
    .Doc(R"doc(
The message of u = values + residual; the residual becomes what it does not say.

With a clip_value above 0, u is limited to that magnitude; clipped counts how
often. bits is 1 or 2, block a multiple of 8.
)doc");

REGISTER_OP("TfBasis>AverageBlocks")
    .Input("residual: resource")
    .Input("messages: uint8")
    .Output("message: uint8")
    .Attr("workers: int >= 1")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetIsStateful()
    .SetShapeFn(MessageShape)
    .Doc(R"doc(
The message of the mean of the workers' messages + residual; the residual becomes
what it does not say.
)doc");

REGISTER_OP("TfBasis>DequantizeBlocks")
    .Input("message: uint8")
    .Input("elements: int64")
    .Output("values: float")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetShapeFn(DequantizedShape)
    .Doc("What a message of that many elements stands for.");

REGISTER_OP("TfBasis>CountUnusable")
    .Input("values: float")
    .Output("count: int64")
    .Attr("limit: float")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc("How many values are NaN or of a magnitude above the limit.");
