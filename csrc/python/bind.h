#pragma once

// Exposes C++ functions to Python: PyTorch's casters convert the arguments, the GIL is released, and C++ errors become
// the Python exceptions that PyTorch raises for them.

#include <cstddef>

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "../libraries/support/open_blocks.h"
#include "../libraries/support/sizes.h"

namespace torchext::python {

template <typename Function>
void bind(pybind11::module_& module, const char* name, Function function) {
  module.def(name, torch::wrap_pybind_function_no_gil(function));
}

// The casters do not accept `noexcept`, which is part of a function's type.
template <typename Result, typename... Arguments>
void bind(pybind11::module_& module, const char* name, Result (*function)(Arguments...) noexcept) {
  bind(module, name, static_cast<Result (*)(Arguments...)>(function));
}

// While an instance exists, tracers and profilers do not observe Python code on this thread.
class UntracedGuard {
 public:
  UntracedGuard() : thread_{PyThreadState_Get()} {
    PyThreadState_EnterTracing(thread_);
  }
  C10_DISABLE_COPY_AND_ASSIGN(UntracedGuard);
  ~UntracedGuard() {
    PyThreadState_LeaveTracing(thread_);
  }

 private:
  PyThreadState* thread_;
};

// Returns the values that `convert` returns for each of `values`.
template <typename Values, typename Convert>
pybind11::tuple asTuple(const Values& values, const Convert& convert) {
  pybind11::tuple result{values.size()};
  for (std::size_t i = 0; i < values.size(); ++i) {
    PyTuple_SET_ITEM(result.ptr(), toSigned(i), pybind11::object{convert(values[i])}.release().ptr());
  }
  return result;
}

// Checks the type. PyTorch's `THPVariable_Check()` and `THPStorage_Check()` read `__class__`, which may run Python code
// that raises an error or returns another class.
inline bool isTensor(PyObject* object) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

inline bool isStorage(PyObject* object) {
  return PyObject_TypeCheck(object, THPStorageClass);
}

inline PyObject* refuse(const char* expected, PyObject* found) {
  return PyErr_Format(PyExc_TypeError, "expected a %s, got %s.", expected, Py_TYPE(found)->tp_name);
}

template <bool (*kAnswer)(const at::TensorBase&)>
PyObject* answer(PyObject* /*module*/, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return isTensor(tensor) ? PyBool_FromLong(kAnswer(THPVariable_Unpack(tensor)) ? 1 : 0)
                          : refuse("torch.Tensor", tensor);
  END_HANDLE_TH_ERRORS
}

template <bool (*kAnswer)(const c10::Storage&)>
PyObject* answer(PyObject* /*module*/, PyObject* storage) {
  HANDLE_TH_ERRORS
  return isStorage(storage) ? PyBool_FromLong(kAnswer(THPStorage_Unpack(storage)) ? 1 : 0)
                            : refuse("torch.UntypedStorage", storage);
  END_HANDLE_TH_ERRORS
}

// `definition` must live as long as the process.
inline void addFunction(pybind11::module_& module, PyMethodDef& definition) {
  const pybind11::object name = module.attr("__name__");
  module.attr(definition.ml_name) =
      pybind11::reinterpret_steal<pybind11::object>(PyCFunction_NewEx(&definition, nullptr, name.ptr()));
}

// Binds a predicate of one tensor or storage that replaced PyTorch functions evaluate at each call. It is a plain
// CPython function, because pybind11 and releasing the GIL cost more than the predicate. `signature` begins with the
// name.
template <auto kAnswer>
void bindPredicate(pybind11::module_& module, const char* name, const char* signature) {
  static PyMethodDef definition{name, &answer<kAnswer>, METH_O, signature};
  addFunction(module, definition);
}

// Binds functions that enter and leave interchangeable blocks: NOTE [Guards and blocks]. Leaving raises if no block is
// open on the thread; `block` is its name in the message. The list of open blocks belongs to this module.
template <typename Guard>
void bindBlock(pybind11::module_& module, const char* enter, const char* leave, const char* block) {
  bind(module, enter, [] { OpenGuards<Guard>::enter(kAnyOwner); });
  bind(module, leave, [block] { OpenGuards<Guard>::leave(kAnyOwner, block); });
}

// Calls a Python function inside a guard that is constructed from `arguments`.
template <typename Guard, typename... Arguments>
pybind11::object callInside(Arguments... arguments,
                            const pybind11::function& function,
                            const pybind11::args& args,
                            const pybind11::kwargs& kwargs) {
  const Guard guard{arguments...};
  return function(*args, **kwargs);
}

}  // namespace torchext::python
