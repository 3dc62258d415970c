#pragma once

// Functions of the library that only tests and benchmarks call, as the Python module `bindings`.

#include "../../csrc/python/bind.h"

namespace torchext::python {

void bindAllocator(pybind11::module_& module);
void bindFills(pybind11::module_& module);
void bindLocks(pybind11::module_& module);

}  // namespace torchext::python
