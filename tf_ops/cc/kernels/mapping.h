// The attributes and inputs that say which bucket a row has.
#ifndef TF_BASIS_KERNELS_MAPPING_H_
#define TF_BASIS_KERNELS_MAPPING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/hash.h"
#include "core/mapping_check.h"
#include "kernels/kernel_util.h"

namespace tf_basis {

class MappingAttributes {
 public:
  void Read(tensorflow::OpKernelConstruction* ctx) {
    OP_REQUIRES_OK(ctx, ctx->GetAttr("exclusive_rows", &exclusive_rows_));
    OP_REQUIRES_OK(ctx, ctx->GetAttr("domains", &domains_));
    GetSeed(ctx, &seed_);
    GetChoice(ctx, "hashing",
              {{"balanced", Hashing::kBalanced},
               {"murmur3", Hashing::kMurmur3},
               {"double", Hashing::kDouble},
               {"consistent", Hashing::kConsistent}},
              &hashing_);
  }

  bool two_buckets() const { return hashing_ == Hashing::kDouble; }
  uint32_t seed() const { return seed_; }

  // The owner tensors must outlive `out`.
  absl::Status Mapping(int64_t n_rows, int64_t num_buckets,
                       const tensorflow::Tensor& owner_rows,
                       const tensorflow::Tensor& owner_buckets,
                       RowMapping* out) const {
    *out = {n_rows, num_buckets, exclusive_rows_, hashing_,
            seed_,  nullptr,     nullptr,         {}};
    out->domains = domains_;
    const std::string sizes = SizesError(*out);
    if (!sizes.empty()) return InvalidArgument(sizes);
    if (owner_rows.shape() != owner_buckets.shape() || owner_rows.dims() != 1 ||
        (owner_rows.NumElements() > 0 &&
         owner_rows.NumElements() != exclusive_rows_)) {
      return InvalidArgument(
          "owner_rows and owner_buckets must be vectors of none or "
          "exclusive_rows = ",
          exclusive_rows_, " numbers, received shapes ",
          owner_rows.shape().DebugString(), " and ",
          owner_buckets.shape().DebugString());
    }
    if (owner_rows.NumElements() == 0 || num_buckets == n_rows) {
      return absl::OkStatus();
    }
    out->owner_rows = owner_rows.flat<int64_t>().data();
    out->owner_buckets = owner_buckets.flat<int64_t>().data();
    const std::string owners = OwnersError(*out);
    if (!owners.empty()) return InvalidArgument(owners);
    return absl::OkStatus();
  }

 private:
  int64_t exclusive_rows_ = 0;
  std::vector<int64_t> domains_;
  Hashing hashing_ = Hashing::kBalanced;
  uint32_t seed_ = 0;
};

}  // namespace tf_basis

#endif  // TF_BASIS_KERNELS_MAPPING_H_
