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
    .Output("buckets: int64")
    .Attr("T: {int32, int64}")
    .Attr("n_rows: int >= 1")
    .Attr("num_buckets: int >= 1")
    .Attr("exclusive_rows: int >= 0 = 0")
    .Attr("hashing: {'balanced', 'murmur3'} = 'balanced'")
    .Attr("seed: int = 0")
    .SetShapeFn(tensorflow::shape_inference::UnchangedShape)
    .Doc("The bucket of each row; rows outside [0, n_rows) are an error.");
