#include "dispatch_table.h"

#include <exception>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "../torch_internals/kernel_identity.h"

namespace torchext {

using c10::DispatchKey;
using c10::KernelFunction;
using c10::OperatorHandle;
using c10::impl::AnnotatedKernel;
using c10::impl::OperatorEntry;

namespace {

// The dispatcher tells where an entry comes from in `dumpComputedTable()` only, as text about all keys. An explicit
// instantiation may name private members ([temp.spec]), and so the function behind it.
template <auto Member>
struct PrivateEntry {
  friend std::pair<const AnnotatedKernel&, const char*> computeEntry(const OperatorEntry& op, DispatchKey key) {
    return (op.*Member)(c10::Dispatcher::singleton(), key);
  }
};
template struct PrivateEntry<&OperatorEntry::computeDispatchTableEntryWithDebug>;
std::pair<const AnnotatedKernel&, const char*> computeEntry(const OperatorEntry& op, DispatchKey key);

template <auto Member>
struct PrivateBoxedKernel {
  friend const c10::BoxedKernel& boxedOf(const KernelFunction& kernel) {
    return kernel.*Member;
  }
};
template struct PrivateBoxedKernel<&KernelFunction::boxed_kernel_func_>;
const c10::BoxedKernel& boxedOf(const KernelFunction& kernel);

template <auto Member>
struct PrivateFunctor {
  friend const c10::OperatorKernel* functorOf(const c10::BoxedKernel& kernel) {
    return (kernel.*Member).get();
  }
};
template struct PrivateFunctor<&c10::BoxedKernel::functor_>;
const c10::OperatorKernel* functorOf(const c10::BoxedKernel& kernel);

// Those of torch.library are instances of `PythonKernelHolder`, which no header declares.
bool isPythonKernel(const KernelFunction& kernel) {
  const c10::OperatorKernel* functor = functorOf(boxedOf(kernel));
  return functor != nullptr &&
         std::string_view{typeid(*functor).name()}.find("PythonKernelHolder") != std::string::npos;
}

// Which alias key the words mean by which `computeDispatchTableEntryWithDebug()` tells why it has chosen a kernel.
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
  const auto [kernel, reason] = computeEntry(operatorEntry(op), key);
  return {kernel.kernel, originOf(op, key, reason), withoutPrefix(kernel.debug, "registered at "),
          isPythonKernel(kernel.kernel)};
}

std::string missingKernelMessage(const OperatorHandle& op, DispatchKey key) {
  try {
    operatorEntry(op).reportError(key);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();  // of the callback that `torch.library` has set
  }
}

}  // namespace torchext
