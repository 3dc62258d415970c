#pragma once

// What the dispatcher keeps private: its tables, with the origin of their entries, and the fallbacks of keys.

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// Returns what the dispatcher knows about `op`, mainly its dispatch table.
const c10::impl::OperatorEntry& operatorEntry(const c10::OperatorHandle& op);

// Returns the kernel that `op` has for the `Meta` key now. It may change when a library is loaded or unloaded. There
// must be one.
const c10::KernelFunction& metaKernelOf(const c10::OperatorHandle& op);

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
