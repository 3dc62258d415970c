#pragma once

// When PyTorch's functions are replaced: NOTE [Leases on PyTorch's functions]. Python declares the replacements
// (torchext/internals/leases.py, torchext/internals/patching.py) and is called when a lease gets its first holder, and
// when it loses its last. Call with the GIL.

#include <pybind11/pybind11.h>

namespace torchext::python {

// Replaces the leased functions. Call it when a lease may have got a holder. Returns false with a Python error.
bool settleLeases();

// Runs a `Steps` of torchext/internals/patching.py, which describes them: NOTE [Replaced C functions]. Replaces or
// restores many functions at once: runs no Python code, so no other thread runs between two steps, unless an attribute
// of a class with an own `__setattr__` is set. An error leaves the remaining functions unchanged.
void exchange(const pybind11::tuple& steps);

}  // namespace torchext::python
