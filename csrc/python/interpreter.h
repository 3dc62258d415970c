#pragma once

// Python objects that the bindings need. The package provides them by name when it is imported:
// `torchext._C.provide()`. C++ gets Python objects in no other way.

#include <cstdint>

#include <pybind11/pybind11.h>

namespace torchext::python {

enum class Provided : std::uint8_t {
  kCurrentLine,               // torchext.internals.events: returns the current line of the program
  kDataDependentError,        // torchext.errors
  kUnsupportedOperatorError,  // torchext.errors
  kMaterializationError,      // torchext.errors
  kFakeCopy,                  // torchext.fake.copying: the class of memos that make fakes
  kKernelGeometry,            // torchext.fake.cuda.kernels: the class that describes tensors to rules
  kKernelSteps,               // torchext.fake.cuda.kernels: applies the rule of an operator
  kObserveOutOfMemory,        // torchext.fake.cuda.devices: calls the program's observers before an error
  kTypedStorage,              // torchext.fake.tensor_patches: PyTorch's class of storages with a dtype
  kSettleLeases,              // torchext.internals.leases: replaces PyTorch's functions, or restores them
  kNotifyModes,               // torchext.amp.amp_tensor: notifies function modes of the begin or end of a region
  kHasFakeImplementation,     // torchext.fake.python_functions: whether a program registered one for an operator
};

// Returns null before the object is provided. Held for the life of the process.
PyObject* provided(Provided what) noexcept;

// Adds `provide()` to the module, and makes Python the interpreter of the core.
void bindInterpreter(pybind11::module_& module);

}  // namespace torchext::python
