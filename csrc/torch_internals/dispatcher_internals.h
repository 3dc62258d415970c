#pragma once

// What the dispatcher knows and does not tell: its tables, with the origin of their entries, and the fallbacks of keys.

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// What the dispatcher knows of `op`, its dispatch table above all.
const c10::impl::OperatorEntry& operatorEntry(const c10::OperatorHandle& op);

// The kernel that `op` has for the `Meta` key now. Libraries that are loaded or unloaded change it. There must be one.
const c10::KernelFunction& metaKernelOf(const c10::OperatorHandle& op);

// A kernel, and the place of its registration as PyTorch's words tell it. The kernel is not valid where there is none.
struct RegisteredKernel {
  c10::KernelFunction kernel;
  std::string source;
};

// The entry of `op` for `key`, which may be `Undefined` but no alias key; `reason` is why the dispatcher has chosen it,
// in the words of `OperatorEntry::computeDispatchTableEntryWithDebug()`.
struct TableKernel {
  RegisteredKernel registered;
  const char* reason;
};
TableKernel tableKernel(const c10::OperatorHandle& op, c10::DispatchKey key);

// Returns true if `kernel` was registered from Python.
bool isPythonKernel(const c10::KernelFunction& kernel);

// The backend fallback of `key`.
RegisteredKernel fallbackOf(c10::DispatchKey key);

// Takes the backend fallback of `key` away from whoever has registered it. Calls that have arrived there go on.
void removeFallback(c10::DispatchKey key);

// Return true if what this file does is right about the PyTorch that runs.
bool testOperatorEntry(bool is_broken);
bool testFallbacks(bool is_broken);

}  // namespace torchext
