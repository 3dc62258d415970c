#pragma once

// What the dispatcher keeps private: its tables, with the origin of their entries, and the fallbacks of keys.

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// Returns what the dispatcher knows about `op`, mainly its dispatch table.
const c10::impl::OperatorEntry& operatorEntry(const c10::OperatorHandle& op);

// Returns true if `op` is PyTorch's, and so is its kernel for the CPU. An unboxed kernel is written in C++; kernels
// that users register in Python are boxed.
bool hasOwnCpuKernel(const c10::OperatorHandle& op);

// Returns the kernel that `op` has for `key`, which is that of a backend, now. It may change when a library is loaded
// or unloaded. Returns a kernel that is not valid if there is none.
const c10::KernelFunction& kernelOf(const c10::OperatorHandle& op, c10::DispatchKey key);

// A kernel, and where it was registered, in PyTorch's words. The kernel is not valid if there is none.
struct RegisteredKernel {
  c10::KernelFunction kernel;
  std::string source;
};

// The entry of an operator for a key, which may be `Undefined`, but not an alias key. `reason` is why the dispatcher
// has chosen it, in the words of `OperatorEntry::computeDispatchTableEntryWithDebug()`.
struct TableKernel {
  RegisteredKernel registered;
  const char* reason;
};
TableKernel tableKernel(const c10::OperatorHandle& op, c10::DispatchKey key);

// Returns true if PyTorch has registered the kernel that `op` has for `key`, and false for one that a program or
// another library has registered, and where there is none.
bool isKernelOfPyTorch(const c10::OperatorHandle& op, c10::DispatchKey key);

// Returns true if `kernel` was registered from Python.
bool isPythonKernel(const c10::KernelFunction& kernel);

// Returns the backend fallback of `key`.
RegisteredKernel fallbackOf(c10::DispatchKey key);

// Removes the backend fallback of `key`, whichever library has registered it. Calls that have reached it continue.
void removeFallback(c10::DispatchKey key);

// Return true if this file is right about the PyTorch that runs.
bool testOperatorEntry(bool is_broken);
bool testFallbacks(bool is_broken);

}  // namespace torchext
