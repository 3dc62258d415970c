#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// One entry of an operator's dispatch table, and where it comes from.
struct TableEntry {
  // Not valid where there is none.
  c10::KernelFunction kernel;

  // The name of the key that the kernel was registered for: the entry's own, or an alias key such as
  // `CompositeImplicitAutograd`. "fallback" for the key's backend fallback, "none" where there is no kernel.
  std::string origin;

  // The place of the registration, as `file:line`. May be empty.
  std::string source;

  // True for a kernel that has been registered from Python.
  bool is_python;
};

// The entry of `op` for `key`, which may be `Undefined` but no alias key. Libraries that are loaded or unloaded change
// it.
TableEntry tableEntry(const c10::OperatorHandle& op, c10::DispatchKey key);

// The message of the error that PyTorch raises when a call arrives at a key that has no kernel. The interpreter may be
// asked for it.
std::string missingKernelMessage(const c10::OperatorHandle& op, c10::DispatchKey key);

}  // namespace torchext
