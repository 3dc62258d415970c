#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>

namespace torchext {

// An entry of an operator's dispatch table, and its origin.
struct TableEntry {
  // Invalid if there is no kernel.
  c10::KernelFunction kernel;

  // The name of the key that the kernel was registered for: the entry's own, or an alias key such as
  // `CompositeImplicitAutograd`. "fallback" for the key's backend fallback, "none" if there is no kernel.
  std::string origin;

  // Where the kernel was registered, as `file:line`. May be empty.
  std::string source;

  // Whether the kernel was registered from Python.
  bool is_python;
};

// Returns the entry of `op` for `key`, which may be `Undefined`, but not an alias key. It may change when a library is
// loaded or unloaded.
TableEntry tableEntry(const c10::OperatorHandle& op, c10::DispatchKey key);

// Returns the message of the error that PyTorch raises when a call reaches a key that has no kernel. May call the
// interpreter.
std::string missingKernelMessage(const c10::OperatorHandle& op, c10::DispatchKey key);

}  // namespace torchext
