#pragma once

// Plain CPython types for blocks: a call through pybind11 costs more than entering a block.

#include <utility>

#include <pybind11/pybind11.h>

namespace torchext::python {

// The parts of a type. `name` and all pointers must stay valid for the life of the process.
struct BlockType {
  const char* name;  // with the module
  int size;
  newfunc make;
  destructor deallocate;
  PyMethodDef* methods;
  PyGetSetDef* properties = nullptr;
};

template <typename Function>
void* asSlot(Function function) {
  return reinterpret_cast<void*>(function);
}

// Returns the entry of `__exit__` for a method table. Its arguments, which describe an exception, come in an array.
using LeaveFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
inline PyMethodDef exitMethod(LeaveFunction leave) {
  return {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(leave)), METH_FASTCALL, nullptr};
}

// Adds the type, which Python classes can derive from, to the module.
inline void addBlockType(pybind11::module_& module, const char* attribute, const BlockType& block) {
  static PyGetSetDef none[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};
  PyGetSetDef* const properties = block.properties == nullptr ? static_cast<PyGetSetDef*>(none) : block.properties;
  PyType_Slot slots[] = {{Py_tp_new, asSlot(block.make)},
                         {Py_tp_dealloc, asSlot(block.deallocate)},
                         {Py_tp_methods, static_cast<void*>(block.methods)},
                         {Py_tp_getset, static_cast<void*>(properties)},
                         {0, nullptr}};
  PyType_Spec spec{block.name, block.size, 0, static_cast<unsigned int>(Py_TPFLAGS_DEFAULT) | Py_TPFLAGS_BASETYPE,
                   static_cast<PyType_Slot*>(slots)};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw pybind11::error_already_set();
  }
  module.attr(attribute) = pybind11::reinterpret_steal<pybind11::object>(type);
}

inline void freeBlock(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// For a class that decorates a function given as its first argument, as in `@block`: calls `block` with `function`.
// `block` may be null with a Python error. Takes ownership of `block`.
inline PyObject* decorateWith(PyObject* block, PyObject* function) {
  if (block == nullptr) {
    return nullptr;
  }
  PyObject* decorated = PyObject_CallOneArg(block, function);
  Py_DECREF(block);
  return decorated;
}

}  // namespace torchext::python
