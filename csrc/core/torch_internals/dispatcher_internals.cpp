#include "dispatcher_internals.h"

#include <cstring>
#include <memory>
#include <string_view>
#include <typeinfo>
#include <utility>

#include <ATen/core/op_registration/op_registration.h>

TORCHEXT_OPEN_MEMBER(DispatchTable, &c10::impl::OperatorEntry::dispatchTable_)
TORCHEXT_OPEN_MEMBER(TableComputation, &c10::impl::OperatorEntry::computeDispatchTableEntryWithDebug)
TORCHEXT_OPEN_MEMBER(Registrations, &c10::impl::OperatorEntry::kernels_)
TORCHEXT_OPEN_MEMBER(BoxedFunction, &c10::KernelFunction::boxed_kernel_func_)
TORCHEXT_OPEN_MEMBER(BoxedFunctor, &c10::BoxedKernel::functor_)

namespace torchext {

using c10::Dispatcher;
using c10::DispatchKey;
using c10::KernelFunction;
using c10::OperatorHandle;
using c10::impl::AnnotatedKernel;
using c10::impl::OperatorEntry;

namespace {

// PyTorch exposes the origin of an entry only in `dumpComputedTable()`, as text about all keys. This is the function
// that it calls.
std::pair<const AnnotatedKernel&, const char*> computeEntry(const OperatorEntry& op, DispatchKey key) {
  return (op.*memberOf(opened::TableComputation{}))(Dispatcher::singleton(), key);
}

const c10::OperatorKernel* functorOf(const KernelFunction& kernel) {
  return (kernel.*memberOf(opened::BoxedFunction{}).*memberOf(opened::BoxedFunctor{})).get();
}

}  // namespace

bool hasOwnCpuKernel(const OperatorHandle& op) {
  if (op.operator_name().name.rfind("aten::", 0) != 0 || !op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) {
    return false;
  }
  const KernelFunction& kernel = kernelOf(op, DispatchKey::CPU);
  return kernel.isValidUnboxed() || kernel.isValidSymUnboxed();
}

const KernelFunction& kernelOf(const OperatorHandle& op, DispatchKey key) {
  return KernelSlot{key}.of(op);
}

const KernelFunction& KernelSlot::of(const OperatorHandle& op) const {
  static const KernelFunction none;
  const KernelFunction& kernel = (operatorEntry(op).*memberOf(opened::DispatchTable{})).data()[index_];
  return kernel.isValid() ? kernel : none;
}

TableKernel tableKernel(const OperatorHandle& op, DispatchKey key) {
  const auto [kernel, reason] = computeEntry(operatorEntry(op), key);
  return {{kernel.kernel, kernel.debug}, reason};
}

namespace {

// Returns the source directory of PyTorch in messages like "registered at DIRECTORY/build/aten/...", from the schemas.
const std::string& sourcesOfPyTorch() {
  static const std::string folder = [] {
    const std::string schema = operatorEntry(Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor")).debug();
    return schema.substr(0, schema.find("build/aten/"));
  }();
  return folder;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

// A kernel written in Python is registered at the line that created its `Library`. For `torch.library.impl()` in a
// program, that is also a line of PyTorch, so only the files that register PyTorch's kernels count.
bool isKernelOfPyTorch(const OperatorHandle& op, DispatchKey key) {
  const auto [kernel, reason] = computeEntry(operatorEntry(op), key);
  if (!kernel.kernel.isValid()) {
    return false;
  }
  if (isPythonKernel(kernel.kernel)) {
    const bool is_prim = operatorEntry(op).operator_name().name.rfind("prims::", 0) == 0;
    return contains(kernel.debug, "torch/_meta_registrations.py:") || contains(kernel.debug, "torch/_prims/") ||
           (is_prim && contains(kernel.debug, "torch/_library/custom_ops.py:"));
  }
  return kernel.debug.rfind(sourcesOfPyTorch(), 0) == 0;
}

// Kernels registered through torch.library are instances of `PythonKernelHolder`, which no header declares.
bool isPythonKernel(const KernelFunction& kernel) {
  const c10::OperatorKernel* functor = functorOf(kernel);
  return functor != nullptr &&
         std::string_view{typeid(*functor).name()}.find("PythonKernelHolder") != std::string::npos;
}

// The most recent registration is the first.
KernelFunction overriddenKernelOf(const OperatorHandle& op, DispatchKey key) {
  const auto& registrations = operatorEntry(op).*memberOf(opened::Registrations{});
  const auto found = registrations.find(key);
  if (found == registrations.end() || found->second.size() != 2 || !isKernelOfPyTorch(op, key) ||
      !isPythonKernel(found->second.front().kernel)) {
    return {};
  }
  const AnnotatedKernel& overridden = found->second.back();
  return overridden.debug.rfind(sourcesOfPyTorch(), 0) == 0 ? overridden.kernel : KernelFunction{};
}

// Compares private and public functions: the public `lookup()` must find the entry behind the private name, and the
// private function must find the entry that the public one finds.
bool testOperatorEntry(bool is_broken) {
  const OperatorHandle op = Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor");
  const OperatorHandle other = Dispatcher::singleton().findSchemaOrThrow("aten::mul", "Tensor");
  const OperatorEntry& entry = operatorEntry(is_broken ? other : op);
  const auto [kernel, reason] = computeEntry(entry, DispatchKey::CPU);
  return entry.operator_name() == op.operator_name() && std::string_view{reason} == "kernel" &&
         identityOf(kernel.kernel) == identityOf(entry.lookup(c10::DispatchKeySet{DispatchKey::CPU})) &&
         identityOf(kernelOf(op, DispatchKey::CPU)) == identityOf(kernel.kernel) &&
         identityOf((entry.*memberOf(opened::Registrations{})).at(DispatchKey::Meta).front().kernel) ==
             identityOf(kernelOf(op, DispatchKey::Meta)) &&
         functorOf(KernelFunction{}) == nullptr;
}

// KernelFunction's comparison compares only its function pointers, which all kernels written in Python share. Its first
// words are the pointer to its functor, which it owns, and three function pointers.
KernelIdentity identityOf(const KernelFunction& kernel) {
  KernelIdentity identity{};
  static_assert(sizeof(kernel) >= sizeof(identity));
  std::memcpy(identity.data(), static_cast<const void*>(&kernel), sizeof(identity));
  return identity;
}

namespace {

// Like a kernel written in Python: a function and an object.
struct Functor final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/) {}
};

KernelFunction makeKernel() {
  return KernelFunction::makeFromBoxedFunctor(std::make_unique<Functor>());
}

}  // namespace

bool testKernelIdentity(bool is_broken) {
  const KernelFunction kernel = makeKernel();
  const KernelFunction& other = is_broken ? kernel : makeKernel();
  const KernelFunction copy = kernel;  // NOLINT(performance-unnecessary-copy-initialization): the copy is tested
  return identityOf(copy) == identityOf(kernel) && identityOf(other) != identityOf(kernel);
}

}  // namespace torchext
