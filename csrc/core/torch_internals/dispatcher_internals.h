#pragma once

// Private data of the dispatcher: its tables, with the origin of their entries.

#include <array>
#include <cstdint>
#include <string>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torchext/macros.h>

#include "private_members.h"

TORCHEXT_OPEN_MEMBER(OperatorDefinition, &c10::OperatorHandle::operatorDef_)

namespace torchext {

// Returns the dispatcher's entry for `op`, mainly its dispatch table. OperatorHandle returns its kernels only as a
// SafeKernelFunction. Making one copies the kernel, allocates, and prints a description.
inline const c10::impl::OperatorEntry& operatorEntry(const c10::OperatorHandle& op) {
  return (op.*memberOf(opened::OperatorDefinition{}))->op;
}

// Returns true if `op` and its CPU kernel are PyTorch's. An unboxed kernel is written in C++; kernels that users
// register in Python are boxed.
bool hasOwnCpuKernel(const c10::OperatorHandle& op);

// Returns the current kernel of `op` for `key`, which must be the key of a backend. It may change when a library is
// loaded or unloaded. Returns an invalid kernel if `op` has none.
const c10::KernelFunction& kernelOf(const c10::OperatorHandle& op, c10::DispatchKey key);

// The place of a key's kernel in the tables of all operators.
class KernelSlot {
 public:
  explicit KernelSlot(c10::DispatchKey key) : index_{c10::getDispatchTableIndexForDispatchKey(key)} {}

  // Returns the same as `kernelOf()`.
  const c10::KernelFunction& of(const c10::OperatorHandle& op) const;

 private:
  int index_;
};

// A kernel, and its place of registration in PyTorch's words. Without a registration, `kernel` is invalid.
struct RegisteredKernel {
  c10::KernelFunction kernel;
  std::string source;
};

// The entry of an operator for a key, which may be `Undefined`, but not an alias key. `reason` explains the
// dispatcher's choice, in the words of `OperatorEntry::computeDispatchTableEntryWithDebug()`.
struct TableKernel {
  RegisteredKernel registered;
  const char* reason;
};
TORCHEXT_API TableKernel tableKernel(const c10::OperatorHandle& op, c10::DispatchKey key);

// Returns true if PyTorch registered the kernel of `op` for `key`. Returns false for a kernel registered by a program
// or another library, and without a kernel.
bool isKernelOfPyTorch(const c10::OperatorHandle& op, c10::DispatchKey key);

// Returns true if `kernel` was registered from Python.
TORCHEXT_API bool isPythonKernel(const c10::KernelFunction& kernel);

// Returns PyTorch's C++ kernel of `op` for `key` if a Python kernel of PyTorch overrides it, and an invalid kernel
// otherwise.
c10::KernelFunction overriddenKernelOf(const c10::OperatorHandle& op, c10::DispatchKey key);

// Returns true if the assumptions of this file hold for the running PyTorch.
bool testOperatorEntry(bool is_broken);

// Identifies a kernel: while a copy of it lives, no other kernel has the same identity.
using KernelIdentity = std::array<std::uint64_t, 4>;
KernelIdentity identityOf(const c10::KernelFunction& kernel);

// Returns true if identities distinguish kernels in the running PyTorch.
bool testKernelIdentity(bool is_broken);

}  // namespace torchext
