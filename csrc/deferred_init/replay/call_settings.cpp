#include "call_settings.h"

#include <algorithm>

#include <ATen/Parallel.h>
#include <c10/util/accumulate.h>

#include "../plan/part_rules.h"

namespace torchext {

namespace {

// Kernels parallelize loops over elements from `at::internal::GRAIN_SIZE` on, and matrix products earlier.
bool isSmall(const OpNode& node) {
  constexpr std::int64_t kNeverDivided = 2048;
  const auto has_few = [](const Geometry& geometry) { return c10::multiply_integers(geometry.sizes) <= kNeverDivided; };
  return std::all_of(node.written().begin(), node.written().end(),
                     [&](const WrittenStorage& written) { return has_few(written.geometry()); }) &&
         std::all_of(node.tensors().begin(), node.tensors().end(), [&](const TensorArgument& argument) {
           return argument.external != nullptr ? argument.external->tensor().numel() <= kNeverDivided
                                               : has_few(argument.geometry());
         });
}

bool isFloat32OnCuda(c10::Device device, caffe2::TypeMeta dtype) {
  return device.is_cuda() &&
         (dtype == caffe2::TypeMeta::Make<float>() || dtype == caffe2::TypeMeta::Make<c10::complex<float>>());
}

bool readsFloat32OnCuda(const OpNode& node) {
  return std::any_of(node.tensors().begin(), node.tensors().end(), [](const TensorArgument& argument) {
    if (argument.external != nullptr) {
      return isFloat32OnCuda(argument.external->tensor().device(), argument.external->tensor().dtype());
    }
    return argument.value != nullptr && isFloat32OnCuda(argument.value->device(), argument.geometry().dtype);
  });
}

}  // namespace

ThreadCountGuard::ThreadCountGuard(const OpNode& node) : previous_{at::get_num_threads()} {
  const KernelSettings& settings = *node.threadState().settings;
  const int recorded = settings.threads();
  if (recorded == previous_ || partRuleOf(node) != PartRule::kNone) {
    return;
  }
  const bool has_lost_threads = settings.wereReadBeforeFork() && recorded > previous_;
  if (!has_lost_threads) {
    at::set_num_threads(recorded);
  }
  const bool is_acceptable = at::get_num_threads() == recorded || isSmall(node);
  if (!is_acceptable && at::get_num_threads() != previous_) {
    at::set_num_threads(previous_);  // an exception in a constructor skips the destructor
  }
  TORCH_CHECK(
      is_acceptable, "`", node.op().operator_name(), "` was recorded with ", recorded,
      " threads, but PyTorch now uses ", previous_,
      has_lost_threads ? " in a forked process, where the others are gone" : ", and the number cannot be changed",
      ". Its last bits may depend on that. Call torch.set_num_threads(", previous_, ") before the construction",
      has_lost_threads ? ", or materialize before the fork." : ".");
}

ThreadCountGuard::~ThreadCountGuard() {
  if (at::get_num_threads() != previous_) {
    at::set_num_threads(previous_);
  }
}

void checkCudaPrecision(const OpNode& node) {
  if (!readsFloat32OnCuda(node) || partRuleOf(node) != PartRule::kNone) {
    return;
  }
  const auto changed = node.threadState().settings->changedCudaPrecision();
  TORCH_CHECK(!changed, "`", node.op().operator_name(),
              "` was recorded with another float32 precision (`torch.backends.", changed.value_or(""),
              "`) than the current one. Restore the setting that was active during construction.");
}

}  // namespace torchext
