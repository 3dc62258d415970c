// The blocks of torchext.inference. They are entered and left by plain CPython types, because a call by way of pybind11
// takes longer than all that there is to do.

#include <string>
#include <vector>

#include "../inference/inference_mode.h"
#include "../inference/mode_blocks.h"
#include "../inference/origins.h"
#include "../inference/to_normal.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

// The state of the threads that are inside is not here: see mode_blocks.h. So one object can be entered again while it
// is open, and on several threads at once.
struct Block {
  PyObject ob_base;  // what PyObject_HEAD says
  BlockOwner owner;
  ModeBlock kind;
  bool is_traced;
};

Block* asBlock(PyObject* self) {
  return reinterpret_cast<Block*>(self);
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
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* enterBlock(PyObject* self, PyObject* /*unused*/) {
  HANDLE_TH_ERRORS
  enterModeBlock(asBlock(self)->owner, asBlock(self)->kind, asBlock(self)->is_traced);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The arguments tell of an exception, which is none of our business.
PyObject* leaveBlock(PyObject* self, PyObject* const* /*unused*/, Py_ssize_t /*unused*/) {
  HANDLE_TH_ERRORS
  leaveModeBlock(asBlock(self)->owner);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// As `type(function)` with a function in the place of the mode, the class decorates it: `@inference_mode`.
PyObject* decorate(PyTypeObject* type, PyObject* function, bool is_traced) {
  PyObject* block = newBlock(type, ModeBlock::kInference, is_traced);
  if (block == nullptr) {
    return nullptr;
  }
  PyObject* decorated = PyObject_CallOneArg(block, function);
  Py_DECREF(block);
  return decorated;
}

// torchext._origins.install(), held for the life of the process.
PyObject* tracing_installer = nullptr;

bool prepareToTrace() {
  if (tracing_installer == nullptr) {
    return true;
  }
  PyObject* done = PyObject_CallNoArgs(tracing_installer);
  Py_XDECREF(done);
  return done != nullptr;
}

PyObject* newInferenceBlock(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* mode = Py_True;
  int is_traced = 0;
  constexpr const char* kNames[] = {"mode", "trace", nullptr};
  // The signature has been without `const` before Python 3.13.
  if ((PyTuple_GET_SIZE(args) != 0 || kwargs != nullptr) &&
      PyArg_ParseTupleAndKeywords(args, kwargs, "|O$p:inference_mode", const_cast<char**>(kNames), &mode, &is_traced) ==
          0) {
    return nullptr;
  }
  if (is_traced != 0 && !prepareToTrace()) {
    return nullptr;
  }
  if (PyBool_Check(mode)) {
    return newBlock(type, mode == Py_True ? ModeBlock::kInference : ModeBlock::kNoInference, is_traced != 0);
  }
  if (PyCallable_Check(mode) != 0) {
    return decorate(type, mode, is_traced != 0);
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

template <typename Function>
void* asSlot(Function function) {
  return reinterpret_cast<void*>(function);
}

// `name` is kept by the type, which before Python 3.11 does not copy it.
void addType(
    pybind11::module_& module, const char* attribute, const char* name, newfunc make, PyGetSetDef* properties) {
  static PyMethodDef methods[] = {
      {"__enter__", &enterBlock, METH_NOARGS, nullptr},
      {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&leaveBlock)), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  PyType_Slot slots[] = {{Py_tp_new, asSlot(make)},
                         {Py_tp_dealloc, asSlot(&deallocateBlock)},
                         {Py_tp_methods, static_cast<void*>(methods)},
                         {Py_tp_getset, static_cast<void*>(properties)},
                         {0, nullptr}};
  PyType_Spec spec{name, static_cast<int>(sizeof(Block)), 0,
                   static_cast<unsigned int>(Py_TPFLAGS_DEFAULT) | Py_TPFLAGS_BASETYPE,
                   static_cast<PyType_Slot*>(slots)};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) {
    throw pybind11::error_already_set();
  }
  module.attr(attribute) = pybind11::reinterpret_steal<pybind11::object>(type);
}

std::vector<std::string> checkDispatchState() {
  return check_dispatch_state();
}

void makeTensorsNormal(const std::vector<at::Tensor>& tensors) {
  makeNormal(tensors);
}

void setTracingInstaller(const pybind11::function& installer) {
  tracing_installer = installer.inc_ref().ptr();
}

std::string originOfTensor(const at::Tensor& tensor) {
  return originOf(tensor);
}

// The error that PyTorch would make of `error`, with a note, which Python has since 3.11.
void raisePythonErrorWithNote(const c10::Error& error, const std::string& note) {
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object type = pybind11::reinterpret_borrow<pybind11::object>(PyExc_RuntimeError);
  if (!pybind11::hasattr(type, "add_note")) {
    return;
  }
  const char* message = torch::get_cpp_stacktraces_enabled() ? error.what() : error.what_without_backtrace();
  const pybind11::object raised = type(torch::processErrorMsg(message));
  raised.attr("add_note")(note);
  PyErr_SetObject(type.ptr(), raised.ptr());
  python_error translated;
  translated.persist();
  throw translated;
}

}  // namespace

void bindInference(pybind11::module_& module) {
  static PyGetSetDef properties[] = {{"mode", &modeOf, nullptr, nullptr, nullptr},
                                     {"trace", &traceOf, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyGetSetDef no_properties[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};
  addType(module, "InferenceBlock", "torchext._C.InferenceBlock", &newInferenceBlock,
          static_cast<PyGetSetDef*>(properties));
  addType(module, "NormalTensorsBlock", "torchext._C.NormalTensorsBlock", &newNormalTensorsBlock,
          static_cast<PyGetSetDef*>(no_properties));
  bind(module, "check_dispatch_state", checkDispatchState);
  bind(module, "is_inference_mode_enabled", InferenceMode::is_enabled);
  bind(module, "make_normal", makeTensorsNormal);
  bind(module, "origin_of", originOfTensor);
  bind(module, "trace_origins_here", traceOriginsHere);
  bind(module, "trace_origins_in_blocks", traceOriginsInBlocks);
  module.def("set_tracing_installer", &setTracingInstaller);
  setNoteRaiser(&raisePythonErrorWithNote);
}

}  // namespace torchext::python
