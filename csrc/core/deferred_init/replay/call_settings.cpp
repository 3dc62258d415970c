#include "call_settings.h"

#include <algorithm>

#include <ATen/Parallel.h>

#include "../../hooks/hooks.h"
#include "../plan/parts.h"

namespace torchext {

namespace {

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
  if (recorded == previous_ || hooks().parts.ruleOf(node) != PartRule::kNone) {
    return;
  }
  at::set_num_threads(recorded);
  TORCH_CHECK(at::get_num_threads() == recorded, "`", node.op().operator_name(), "` was recorded with ", recorded,
              " threads, but PyTorch now uses ", previous_,
              ", and the number cannot be changed. Its last bits may depend on that. Call torch.set_num_threads(",
              previous_, ") before the construction.");
}

ThreadCountGuard::~ThreadCountGuard() {
  if (at::get_num_threads() != previous_) {
    at::set_num_threads(previous_);
  }
}

void checkCudaPrecision(const OpNode& node) {
  if (!readsFloat32OnCuda(node) || hooks().parts.ruleOf(node) != PartRule::kNone) {
    return;
  }
  const auto changed = node.threadState().settings->changedCudaPrecision();
  TORCH_CHECK(!changed, "`", node.op().operator_name(),
              "` was recorded with another float32 precision (`torch.backends.", changed.value_or(""),
              "`) than the current one. Restore the setting that was active during construction.");
}

}  // namespace torchext
