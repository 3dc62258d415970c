#include <vector>

#include <torchext/inference_mode.h>

#include "../extensions/marks/origins.h"
#include "../extensions/marks/tensor_marks.h"
#include "bind.h"
#include "block_type.h"
#include "module.h"

namespace torchext::python {

namespace {

struct InferenceBlock {
  static constexpr bool kBindsItself = false;

  InferenceBlock(ModeBlock its_kind, bool traces) : kind{its_kind}, is_traced{traces} {}
  C10_DISABLE_COPY_AND_ASSIGN(InferenceBlock);
  ~InferenceBlock() {
    abandonModeBlocks(owner);
  }

  void enter() const {
    enterTracedBlock(owner, kind, is_traced);
  }
  void leave() const {
    leaveModeBlock(owner);
  }
  static bool notify(PyObject* /*self*/, bool /*is_entered*/) noexcept {
    return true;
  }

  const ModeBlock kind;
  const bool is_traced;
  const BlockOwner owner = newBlockOwner();
};

PyObject* newInference(PyTypeObject* type, ModeBlock kind, bool is_traced) {
  return newBlock<InferenceBlock>(type, kind, is_traced);
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
    return newInference(type, mode == Py_True ? ModeBlock::kInference : ModeBlock::kNoInference, is_traced != 0);
  }
  if (PyCallable_Check(mode) != 0) {
    return decorateWith(newInference(type, ModeBlock::kInference, is_traced != 0), mode);
  }
  return PyErr_Format(PyExc_TypeError,
                      "inference_mode() takes True, False or a function to decorate, but `mode` is a %s.",
                      Py_TYPE(mode)->tp_name);
}

PyObject* newNormalTensorsBlock(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (PyTuple_GET_SIZE(args) != 0 || (kwargs != nullptr && PyDict_GET_SIZE(kwargs) != 0)) {
    return PyErr_Format(PyExc_TypeError, "normal_tensors() takes no arguments.");
  }
  return newInference(type, ModeBlock::kNormalTensors, /*is_traced=*/false);
}

PyObject* modeOf(PyObject* self, void* /*unused*/) {
  return PyBool_FromLong(blockOf<InferenceBlock>(self).kind == ModeBlock::kInference ? 1 : 0);
}

PyObject* traceOf(PyObject* self, void* /*unused*/) {
  return PyBool_FromLong(blockOf<InferenceBlock>(self).is_traced ? 1 : 0);
}

void addTypes(pybind11::module_& module) {
  static PyMethodDef methods[] = {
      enterMethod<InferenceBlock>(), exitMethod<InferenceBlock>(), {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef properties[] = {{"mode", &modeOf, nullptr, nullptr, nullptr},
                                     {"trace", &traceOf, nullptr, nullptr, nullptr},
                                     {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyGetSetDef none[] = {{nullptr, nullptr, nullptr, nullptr, nullptr}};
  addBlockType<InferenceBlock>(module, "InferenceBlock", "torchext._C.InferenceBlock", &newInferenceBlock,
                               static_cast<PyMethodDef*>(methods), static_cast<PyGetSetDef*>(properties));
  addBlockType<InferenceBlock>(module, "NormalTensorsBlock", "torchext._C.NormalTensorsBlock", &newNormalTensorsBlock,
                               static_cast<PyMethodDef*>(methods), static_cast<PyGetSetDef*>(none));
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
  bind(module, "is_marked", [](const at::Tensor& tensor) { return marksOf(*tensor.unsafeGetTensorImpl()) != nullptr; });
  bind(module, "without_marks", [](const at::Tensor& tensor) { return withoutMarks(tensor); });
  bind(module, "drop_stale_demands", dropStaleDemands);
}

}  // namespace torchext::python
