#pragma once

// What the bindings need from the Python code of the package, which provides it by name when it is imported:
// `torchext._C.provide()`. This is the one place where Python is given to C++.

#include <cstddef>
#include <cstdint>

#include <pybind11/pybind11.h>

namespace torchext::python {

enum class Provided : std::uint8_t {
  kCurrentLine,               // torchext.tools.source_lines: returns where the program stands
  kDataDependentError,        // torchext.fake: the class of errors
  kUnsupportedOperatorError,  // torchext.fake: the class of errors
  kFakeCopy,                  // torchext.fake.copying: the class of memos that make fakes
  kTypedStorage,              // torchext.fake.patches.python_data: PyTorch's class of storages with a dtype
  kSettleLeases,              // torchext.tools.leases: replaces PyTorch's functions, or gives them back
  kTellModes,                 // torchext.amp.function_modes: tells function modes that a region begins or ends
};

// Null before it is provided. Held for the life of the process.
PyObject* provided(Provided what) noexcept;

// Adds `provide()` to the module, and makes Python the interpreter of the core.
void bindInterpreter(pybind11::module_& module);

}  // namespace torchext::python
