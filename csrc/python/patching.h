#pragma once

// Replaces PyTorch functions, many at once: when the first torchext tensor is made. Restores them when the last is
// destroyed. torchext/tools/patching.py declares the replacements. Call with the GIL. An error leaves the remaining
// functions unchanged.

#include <pybind11/pybind11.h>

namespace torchext::python {

// Runs a `Steps` of torchext/tools/patching.py, which describes them: NOTE [Replaced C functions]. Runs no Python code,
// so no other thread runs between two steps, unless an attribute of a class with an own `__setattr__` is set.
void exchange(const pybind11::tuple& steps);

}  // namespace torchext::python
