#pragma once

// Plain CPython types for blocks: a call through pybind11 costs more than entering a block.
//
// An object of Python holds a `Block`, which has
//   void enter();                                       // raises errors
//   void leave();                                       // raises errors
//   bool notify(PyObject* self, bool is_entered) const; // after both; returns false with a Python error
//   static constexpr bool kBindsItself;                 // whether `with ... as` binds the object, or None
// The state of the threads inside belongs to the threads: NOTE [Guards and blocks]. So an object can be entered again
// while it is open, and on several threads at once.

#include <utility>

#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "leases.h"

namespace torchext::python {

template <typename Block>
struct BlockObject {
  PyObject_HEAD Block block;
};

template <typename Block>
Block& blockOf(PyObject* self) {
  return reinterpret_cast<BlockObject<Block>*>(self)->block;
}

// Returns a new object, or null with a Python error.
template <typename Block, typename... Arguments>
PyObject* newBlock(PyTypeObject* type, Arguments&&... arguments) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    new (&blockOf<Block>(self)) Block{std::forward<Arguments>(arguments)...};
  }
  return self;
}

template <typename Block>
void freeBlock(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  blockOf<Block>(self).~Block();
  type->tp_free(self);
  Py_DECREF(type);
}

template <typename Block>
PyObject* enterBlock(PyObject* self, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  blockOf<Block>(self).enter();
  if (!settleLeases() || !blockOf<Block>(self).notify(self, /*is_entered=*/true)) {
    blockOf<Block>(self).leave();
    return nullptr;
  }
  PyObject* const bound = Block::kBindsItself ? self : Py_None;
  Py_INCREF(bound);
  return bound;
  END_HANDLE_TH_ERRORS
}

// Ignores the arguments, which describe an exception.
template <typename Block>
PyObject* leaveBlock(PyObject* self, PyObject* const* /*unused*/, Py_ssize_t /*unused*/) {
  HANDLE_TH_ERRORS
  blockOf<Block>(self).leave();
  if (!blockOf<Block>(self).notify(self, /*is_entered=*/false)) {
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The entries of a method table. The arguments of `__exit__` come in an array.
template <typename Block>
PyMethodDef enterMethod() {
  return {"__enter__", &enterBlock<Block>, METH_NOARGS, nullptr};
}
template <typename Block>
PyMethodDef exitMethod() {
  return {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&leaveBlock<Block>)), METH_FASTCALL,
          nullptr};
}

template <typename Function>
void* asSlot(Function function) {
  return reinterpret_cast<void*>(function);
}

// Adds the type, which Python classes can derive from, to the module. `name` includes the module. All pointers must
// stay valid for the life of the process.
template <typename Block>
void addBlockType(pybind11::module_& module,
                  const char* attribute,
                  const char* name,
                  newfunc make,
                  PyMethodDef* methods,
                  PyGetSetDef* properties) {
  PyType_Slot slots[] = {{Py_tp_new, asSlot(make)},
                         {Py_tp_dealloc, asSlot(&freeBlock<Block>)},
                         {Py_tp_methods, static_cast<void*>(methods)},
                         {Py_tp_getset, static_cast<void*>(properties)},
                         {0, nullptr}};
  constexpr int kSize = sizeof(BlockObject<Block>);
  PyType_Spec spec{name, kSize, 0, static_cast<unsigned int>(Py_TPFLAGS_DEFAULT) | Py_TPFLAGS_BASETYPE,
                   static_cast<PyType_Slot*>(slots)};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw pybind11::error_already_set();
  }
  module.attr(attribute) = pybind11::reinterpret_steal<pybind11::object>(type);
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
