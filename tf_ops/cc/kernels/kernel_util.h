// What every kernel needs from TensorFlow: threads, attributes, and the
// variables it writes, locked in one order and safe to change in place.
#ifndef TF_BASIS_KERNELS_KERNEL_UTIL_H_
#define TF_BASIS_KERNELS_KERNEL_UTIL_H_

#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "core/parallel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace tf_basis {

template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

inline ParallelFor ThreadsOf(tensorflow::OpKernelContext* ctx) {
  auto* workers = ctx->device()->tensorflow_cpu_worker_threads()->workers;
  return [workers](int64_t total, int64_t cost,
                   const std::function<void(int64_t, int64_t)>& work) {
    if (total > 0) workers->ParallelFor(total, cost, work);
  };
}

// Reads a string attribute that names one of `choices`.
template <typename Choice>
void GetChoice(tensorflow::OpKernelConstruction* ctx, const char* attr,
               const std::map<std::string, Choice>& choices, Choice* out) {
  std::string name;
  OP_REQUIRES_OK(ctx, ctx->GetAttr(attr, &name));
  const auto found = choices.find(name);
  OP_REQUIRES(ctx, found != choices.end(),
              InvalidArgument(attr, " has no choice '", name, "'"));
  *out = found->second;
}

// Seeds are uint32 values carried in an int64 attribute.
inline void GetSeed(tensorflow::OpKernelConstruction* ctx, uint32_t* seed) {
  int64_t value;
  OP_REQUIRES_OK(ctx, ctx->GetAttr("seed", &value));
  OP_REQUIRES(ctx, value >= 0 && value <= 0xffffffffll,
              InvalidArgument("seed must be in [0, 2**32), received ", value));
  *seed = static_cast<uint32_t>(value);
}

// The variables behind resource handles, held exclusively until destruction.
class LockedVariables {
 public:
  absl::Status Lock(tensorflow::OpKernelContext* ctx,
                    const std::vector<tensorflow::ResourceHandle>& handles) {
    std::map<tensorflow::Var*, bool> ordered;  // by address: no deadlock
    for (const auto& handle : handles) {
      tensorflow::core::RefCountPtr<tensorflow::Var> var;
      TF_RETURN_IF_ERROR(tensorflow::LookupResource(ctx, handle, &var));
      if (!ordered.emplace(var.get(), true).second) {
        return InvalidArgument("variable ", handle.name(), " is passed twice");
      }
      vars_.push_back(std::move(var));
    }
    for (auto& entry : ordered) {
      locks_.push_back(
          std::make_unique<tensorflow::mutex_lock>(*entry.first->mu()));
    }
    for (size_t i = 0; i < vars_.size(); ++i) {
      if (!vars_[i]->tensor()->IsInitialized()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "variable ", handles[i].name(), " is not initialized"));
      }
    }
    return absl::OkStatus();
  }

  const tensorflow::Tensor& tensor(int i) const { return *vars_[i]->tensor(); }

  // Makes variable `i` writable in place; whoever still holds its buffer keeps
  // the old values. Readers from now on take copies, so that this never has to
  // copy a table for a few rows; with `share_reads` they take the buffer as it
  // is, which is better where all of it is written anyway.
  absl::Status MakeWritable(tensorflow::OpKernelContext* ctx, int i,
                            bool share_reads = false) {
    tensorflow::Var* var = vars_[i].get();
    tensorflow::Tensor* tensor = var->tensor();
    if (!tensor->RefCountIsOne()) {
      tensorflow::Tensor copy;
      TF_RETURN_IF_ERROR(
          ctx->allocate_temp(tensor->dtype(), tensor->shape(), &copy));
      std::memcpy(copy.data(), tensor->data(), tensor->TotalBytes());
      *tensor = copy;
    }
    if (!share_reads) var->copy_on_read_mode.store(true);
    return absl::OkStatus();
  }

  void* data(int i) { return vars_[i]->tensor()->data(); }

 private:
  std::vector<tensorflow::core::RefCountPtr<tensorflow::Var>> vars_;
  std::vector<std::unique_ptr<tensorflow::mutex_lock>> locks_;
};

}  // namespace tf_basis

#endif  // TF_BASIS_KERNELS_KERNEL_UTIL_H_
