#include "device_checks.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "../../libraries/support/stack_utils.h"

namespace torchext {

namespace {

ReadNativeFunctions& reader() {
  static auto* const read = new ReadNativeFunctions;  // leaked: threads may run operators until the process ends
  return *read;
}

// Several threads may read the names if they need them at the same time. A lock, or a static variable during its
// initialization, would stay locked in a child process forked in the meantime.
const NativeFunctions& namesOfOperators() {
  static std::atomic<const NativeFunctions*> names{nullptr};
  const NativeFunctions* known = names.load(std::memory_order_acquire);
  if (known == nullptr) {
    auto read = std::make_unique<const NativeFunctions>(reader() ? reader()() : NativeFunctions{});
    if (names.compare_exchange_strong(known, read.get(), std::memory_order_acq_rel)) {
      return *read.release();
    }
  }
  return *known;
}

}  // namespace

void setNativeFunctions(ReadNativeFunctions read) {
  reader() = std::move(read);
}

bool comparesDevices(const c10::OperatorHandle& op) {
  return namesOfOperators().first.count(c10::toString(op.operator_name())) != 0;
}

bool sharesKernels(const c10::OperatorHandle& op) {
  return namesOfOperators().second.count(c10::toString(op.operator_name())) != 0;
}

std::optional<c10::DispatchKey> kernelForSeveralDevices(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  constexpr c10::DispatchKey kSlow = c10::DispatchKey::CompositeExplicitAutograd;
  if (op.schema().name().rfind("aten::_foreach_", 0) != 0 || !op.hasKernelForDispatchKey(kSlow)) {
    return std::nullopt;
  }
  std::optional<c10::Device> first;
  const bool differs = std::any_of(arguments.begin(), arguments.end(), [&first](const IValue& argument) {
    return argument.isTensorList() && hasTensor(argument, [&first](const Tensor& tensor) {
             first = first.value_or(tensor.device());
             return *first != tensor.device();
           });
  });
  return differs ? std::optional{kSlow} : std::nullopt;
}

}  // namespace torchext
