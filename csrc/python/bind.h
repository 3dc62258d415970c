#pragma once

// How C++ functions are exposed: arguments converted by PyTorch's casters, the GIL released, and C++ errors turned into
// the Python exceptions that PyTorch itself would raise for them.

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace torchext::python {

template <typename Function>
void bind(pybind11::module_& module, const char* name, Function function) {
  module.def(name, torch::wrap_pybind_function_no_gil(function));
}

// Calls a function of Python's inside of a guard.
template <typename Guard>
pybind11::object callInside(const pybind11::function& function,
                            const pybind11::args& args,
                            const pybind11::kwargs& kwargs) {
  const Guard guard;
  return function(*args, **kwargs);
}

}  // namespace torchext::python
