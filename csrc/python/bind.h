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

// The casters know no functions that are `noexcept`, which is part of their type.
template <typename Result, typename... Arguments>
void bind(pybind11::module_& module, const char* name, Result (*function)(Arguments...) noexcept) {
  bind(module, name, static_cast<Result (*)(Arguments...)>(function));
}

// Calls a function of Python's inside of a guard that is made of the arguments before it.
template <typename Guard, typename... Arguments>
pybind11::object callInside(Arguments... arguments,
                            const pybind11::function& function,
                            const pybind11::args& args,
                            const pybind11::kwargs& kwargs) {
  const Guard guard{arguments...};
  return function(*args, **kwargs);
}

}  // namespace torchext::python
