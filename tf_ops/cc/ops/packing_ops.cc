#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace {

using tensorflow::shape_inference::InferenceContext;

absl::Status Vectors(InferenceContext* c) {
  for (int i = 0; i < c->num_outputs(); ++i) {
    c->set_output(i, c->Vector(InferenceContext::kUnknownDim));
  }
  return absl::OkStatus();
}

}  // namespace

REGISTER_OP("TfBasis>PackMessage")
    .Input("message: uint8")
    .Input("with_scales: bool")
    .Output("packed: uint8")
    .Output("sizes: int32")
    .Output("scales: float")
    .Attr("elements: list(int)")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetShapeFn(Vectors)
    .Doc(R"doc(
Messages of so many elements each, one after the other, as they travel.

Scales go along only with_scales, deflated by zlib where that makes them smaller. sizes
are the bytes of each segment, scales those of the messages.
)doc");

REGISTER_OP("TfBasis>UnpackMessage")
    .Input("packed: uint8")
    .Input("known: float")
    .Output("message: uint8")
    .Output("scales: float")
    .Attr("elements: list(int)")
    .Attr("bits: int >= 1")
    .Attr("block: int >= 8")
    .SetShapeFn(Vectors)
    .Doc(R"doc(
The reverse of PackMessage. Where no scales came along they are those known.
)doc");
