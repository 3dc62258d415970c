#pragma once

// The process groups in the arguments of operators. A PyTorch that was built without process groups has no such
// operators, and lacks the functions that `process_groups.cpp` calls. Then setup.py omits that file, and
// `communicationBackend()` returns nothing.

#include <optional>
#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

namespace torchext {

// Returns true for the TorchScript class type `c10d::ProcessGroup`.
bool isProcessGroup(const c10::Type& type);

// Returns true for an argument that names a process group: the object, or a name that `c10d::resolve_process_group()`
// resolves.
bool namesProcessGroup(const c10::Argument& argument);

// Returns the name of the backend that the call would use for tensors on `device`, or nothing if the call names no
// group, or a group of another library.
std::optional<std::string> communicationBackend(const c10::OperatorHandle& op,
                                                c10::ArrayRef<c10::IValue> arguments,
                                                c10::Device device);

// Registers the implementation of `communicationBackend()` for the value of such an argument (`process_groups.cpp`).
using BackendOfGroup = std::optional<std::string> (*)(const c10::IValue& group, c10::Device device);
bool setBackendOfGroup(BackendOfGroup function) noexcept;

// Returns the name of a reduction, such as "SUM", if `value` is one.
TORCHEXT_API std::string nameOfReduction(const c10::IValue& value);
using NameOfReduction = std::string (*)(const c10::IValue& value);
bool setNameOfReduction(NameOfReduction function) noexcept;

}  // namespace torchext
