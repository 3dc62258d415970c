#include <vector>

#include <torchext/inference_mode.h>

#include "../extensions/marks/origins.h"
#include "bind.h"
#include "block_type.h"
#include "leases.h"
#include "module.h"

namespace torchext::python {

namespace {

// The state of the threads inside is in mode_blocks.h. So one object can be entered again while it is open, and on
// several threads at once.
struct InferenceBlock {
  PyObject_HEAD BlockOwner owner;
  ModeBlock kind;
  bool is_traced;
};

InferenceBlock* asBlock(PyObject* self) {
  return reinterpret_cast<InferenceBlock*>(self);
}

PyObject* newBlock(PyTypeObject* type, ModeBlock kind, bool is_traced = false) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    asBlock(self)->owner = newBlockOwner();
    asBlock(self)->kind = kind;
    asBlock(self)->is_traced = is_traced;
  }
  return self;
}

void deallocateBlock(PyObject* self) {
  abandonModeBlocks(asBlock(self)->owner);
  freeBlock(self);
}

PyObject* enterBlock(PyObject* self, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  enterTracedBlock(asBlock(self)->owner, asBlock(self)->kind, asBlock(self)->is_traced);
  if (!settleLeases()) {
    leaveModeBlock(asBlock(self)->owner);
    return nullptr;
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Ignores the arguments, which describe an exception.
PyObject* leaveBlock(PyObject* self, PyObject* const* /*unused*/, Py_ssize_t /*unused*/) {
  HANDLE_TH_ERRORS
  leaveModeBlock(asBlock(self)->owner);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* newInferenceBlock(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* mode = Py_True;
  int is_traced = 0;
  constexpr const char* kNames[] = {"mode", "trace", nullptr};
  // The parameter is not `const` before Python 3.13.
  if ((PyTuple_GET_SIZE(args) != 0 || kwargs != nullptr) &&
      PyArg_ParseTupleAndKeywords(args, kwargs, "|O$p:inference_mode", const_cast<char**>(kNames), &mode, &is_traced) ==
          0) {
    return nullptr;
  }
  if (PyBool_Check(mode)) {
    return newBlock(type, mode == Py_True ? ModeBlock::kInference : ModeBlock::kNoInference, is_traced != 0);
  }
  if (PyCallable_Check(mode) != 0) {
    return decorateWith(newBlock(type, ModeBlock::kInference, is_traced != 0), mode);
  }
  return PyErr_Format(PyExc_TypeError,
                      "inference_mode() takes True, False or a function to decorate, but `mode` is a %s.",
                      Py_TYPE(mode)->tp_name);
}

PyObject* newNormalTensorsBlock(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (PyTuple_GET_SIZE(args) != 0 || (kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0)) {
    return PyErr_Format(PyExc_TypeError, "normal_tensors() takes no arguments.");
  }
  return newBlock(type, ModeBlock::kNormalTensors);
}

PyObject* modeOf(PyObject* self, void* /*unused*/) {
  return PyBool_FromLong(asBlock(self)->kind == ModeBlock::kInference ? 1 : 0);
}

PyObject* traceOf(PyObject* self, void* /*unused*/) {
  return PyBool_FromLong(asBlock(self)->is_traced ? 1 : 0);
}

void addTypes(pybind11::module_& module) {
  static PyMethodDef methods[] = {
      {"__enter__", &enterBlock, METH_NOARGS, nullptr}, exitMethod(&leaveBlock), {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {{"mode", &modeOf, nullptr, nullptr, nullptr},
                                     {"trace", &traceOf, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  constexpr int kSize = sizeof(InferenceBlock);
  addBlockType(module, "InferenceBlock",
               {"torchext._C.InferenceBlock", kSize, &newInferenceBlock, &deallocateBlock,
                static_cast<PyMethodDef*>(methods), static_cast<PyGetSetDef*>(properties)});
  addBlockType(module, "NormalTensorsBlock",
               {"torchext._C.NormalTensorsBlock", kSize, &newNormalTensorsBlock, &deallocateBlock,
                static_cast<PyMethodDef*>(methods)});
}

}  // namespace

void bindInference(pybind11::module_& module) {
  addTypes(module);
  bind(module, "check_dispatch_state", [] { return check_dispatch_state(); });
  bind(module, "is_inference_mode_enabled", InferenceMode::is_enabled);
  bind(module, "make_normal", [](const std::vector<at::Tensor>& tensors) { makeNormal(tensors); });
  bind(module, "origin_of", [](const at::Tensor& tensor) { return originOf(tensor); });
  bind(module, "trace_origins_here", traceOriginsHere);
  bind(module, "trace_origins_in_blocks", traceOriginsInBlocks);
}

}  // namespace torchext::python
