#pragma once

// Replaces PyTorch functions, many at once: when the first torchext tensor is made. Restores them when the last is
// destroyed. torchext/tools/patching.py declares the replacements. Call with the GIL. An error leaves the remaining
// functions unchanged.

#include <pybind11/pybind11.h>

namespace torchext::python {

// For each (C function, replacement or None, concerns): NOTE [Replaced C functions]. `None` restores the original.
void replaceFunctions(const pybind11::list& steps);

// For each (Python function, expected code, new code): sets the code, unless the current code is not the expected one.
void exchangeCodes(const pybind11::list& steps);

}  // namespace torchext::python
