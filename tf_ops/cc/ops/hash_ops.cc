#include <string>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

REGISTER_OP("TfBasis>HashMurmur3")
    .Input("ids: T")
    .Output("hashes: uint32")
    .Attr("T: {int32, int64}")
    .Attr("seed: int = 0")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("MurmurHash3_x86_32 of each id as 8 little-endian bytes of int64.");

REGISTER_OP("TfBasis>MapRows")
    .Input("rows: T")
    .Input("owner_rows: int64")
    .Input("owner_buckets: int64")
    .Output("buckets: int64")
    .Attr("T: {int32, int64}")
    .Attr("n_rows: int >= 1")
    .Attr("num_buckets: int >= 1")
    .Attr("exclusive_rows: int >= 0 = 0")
    .Attr("hashing: {'balanced', 'murmur3', 'double', 'consistent'}")
    .Attr("seed: int = 0")
    .Attr("domains: list(int) = []")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) {
      std::string hashing;
      TF_RETURN_IF_ERROR(c->GetAttr("hashing", &hashing));
      tensorflow::shape_inference::ShapeHandle shape = c->input(0);
      if (hashing == "double") {
        TF_RETURN_IF_ERROR(c->Concatenate(shape, c->Vector(2), &shape));
      }
      c->set_output(0, shape);
      return absl::OkStatus();
    })
    .Doc("The bucket of each row, or (double) the two in a last dimension.");
