#include "composed_kernels.h"

#include <array>
#include <string_view>
#include <unordered_map>

#include "../../support/stack_utils.h"

namespace torchext {

using c10::DispatchKey;
using c10::OperatorHandle;

namespace {

// Those of which the kernel allocates more than its results, and reads no value.
constexpr std::array<const char*, 1> kComposed{"_trilinear"};

using KernelsByOperator = std::unordered_map<OperatorHandle, DispatchKey>;

KernelsByOperator resolve() {
  constexpr std::array kKeys{DispatchKey::CompositeExplicitAutograd,
                             DispatchKey::CompositeExplicitAutogradNonFunctional};
  KernelsByOperator kernels;
  for (const char* name : kComposed) {
    const auto op = c10::Dispatcher::singleton().findOp({std::string{"aten::"} + name, ""});
    for (const DispatchKey key : kKeys) {
      // Not every release has every operator.
      if (op && op->hasKernelForDispatchKey(key)) {
        kernels.emplace(*op, key);
      }
    }
  }
  return kernels;
}

bool isOnCuda(c10::ArrayRef<c10::IValue> arguments) {
  bool is_any = false;
  forEachTensor(arguments, [&is_any](const at::Tensor& tensor) { is_any = is_any || tensor.is_cuda(); });
  return is_any;
}

}  // namespace

std::optional<DispatchKey> composedKernelOnCuda(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  static const KernelsByOperator kernels = resolve();
  const auto found = kernels.find(op);
  if (found == kernels.end() || !isOnCuda(arguments)) {
    return std::nullopt;
  }
  return found->second;
}

}  // namespace torchext
