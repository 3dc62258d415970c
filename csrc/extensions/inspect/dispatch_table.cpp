#include "dispatch_table.h"

#include <exception>
#include <string_view>
#include <utility>

#include "../../core/torch_internals/dispatcher_internals.h"

namespace torchext {

using c10::DispatchKey;
using c10::OperatorHandle;

namespace {

// Returns the key for `reason`, the text by which `computeDispatchTableEntryWithDebug()` explains its choice of a
// kernel.
std::string originOf(const OperatorHandle& op, DispatchKey key, std::string_view reason) {
  if (reason == "kernel") {
    return c10::toString(key);
  }
  if (reason == "default backend kernel") {
    const DispatchKey strictest = DispatchKey::CompositeExplicitAutogradNonFunctional;
    const bool is_strictest = op.hasKernelForDispatchKey(strictest) &&
                              (key == DispatchKey::Undefined || c10::isIncludedInAlias(key, strictest));
    return c10::toString(is_strictest ? strictest : DispatchKey::CompositeExplicitAutograd);
  }
  if (reason == "math kernel") {
    return c10::toString(DispatchKey::CompositeImplicitAutograd);
  }
  if (reason == "nested kernel") {
    return c10::toString(DispatchKey::CompositeImplicitAutogradNestedTensor);
  }
  if (reason == "autograd kernel") {
    return c10::toString(DispatchKey::Autograd);
  }
  if (reason == "batched kernel") {
    return c10::toString(DispatchKey::FuncTorchBatchedDecomposition);
  }
  return reason == "backend fallback" ? "fallback" : "none";
}

std::string withoutPrefix(const std::string& text, std::string_view prefix) {
  return text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
}

}  // namespace

TableEntry tableEntry(const OperatorHandle& op, DispatchKey key) {
  TableKernel found = tableKernel(op, key);
  const bool is_python = isPythonKernel(found.registered.kernel);
  return {std::move(found.registered.kernel), originOf(op, key, found.reason),
          withoutPrefix(found.registered.source, "registered at "), is_python};
}

std::string missingKernelMessage(const OperatorHandle& op, DispatchKey key) {
  try {
    operatorEntry(op).reportError(key);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();  // the error of the callback that `torch.library` sets
  }
}

}  // namespace torchext
