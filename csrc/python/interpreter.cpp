#include "interpreter.h"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include <torch/csrc/Exceptions.h>

#include "../libraries/support/interpreter.h"
#include "../libraries/support/sizes.h"

namespace torchext::python {

namespace {

// In the order of Provided.
constexpr std::array<const char*, 12> kNames{
    "current_line",    "data_dependent_error",   "unsupported_operator_error", "materialization_error", "fake_copy",
    "kernel_geometry", "kernel_steps",           "observe_out_of_memory",      "typed_storage",         "settle_leases",
    "notify_modes",    "has_fake_implementation"};

std::array<PyObject*, kNames.size()>& objects() noexcept {
  static std::array<PyObject*, kNames.size()> all{};
  return all;
}

// In the order of ErrorKind.
constexpr std::array<Provided, kErrorKinds> kClasses{Provided::kDataDependentError, Provided::kUnsupportedOperatorError,
                                                     Provided::kMaterializationError};

void provide(const std::string& name, const pybind11::object& value) {
  const auto* const found = std::find(kNames.begin(), kNames.end(), name);
  TORCH_CHECK_VALUE(found != kNames.end(), "provide() knows no `", name, "`.");
  objects().at(toSize(found - kNames.begin())) = value.inc_ref().ptr();
}

// Throws the error that the Python API has set.
[[noreturn]] void throwPythonError() {
  python_error error;
  error.persist();
  throw error;
}

// Takes ownership of a new reference that the Python API returns.
template <typename Object>
pybind11::object stolen(Object* object) {
  return pybind11::reinterpret_steal<pybind11::object>(reinterpret_cast<PyObject*>(object));
}

// Names of files may contain bytes that are not UTF-8, which Python represents by lone surrogates.
std::string textOf(const pybind11::handle& text) {
  return stolen(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace")).cast<std::string>();
}

class Python final : public Interpreter {
 public:
  void withoutLock(c10::function_ref<void()> run) const override {
    if (PyGILState_Check() == 0) {
      run();
      return;
    }
    const pybind11::gil_scoped_release no_gil;
    run();
  }

  void withLock(c10::function_ref<void()> run) const override {
    const pybind11::gil_scoped_acquire gil;
    run();
  }

  // Exceptions that stop a program derive from BaseException, failures from Exception.
  bool isInterrupt(const std::exception& error) const override {
    const auto* of_torch = dynamic_cast<const python_error*>(&error);
    const auto* of_pybind = dynamic_cast<const pybind11::error_already_set*>(&error);
    if (of_torch == nullptr && of_pybind == nullptr) {
      return false;
    }
    const pybind11::gil_scoped_acquire gil;
    PyObject* type = of_torch != nullptr ? of_torch->type : of_pybind->type().ptr();
    return type != nullptr && PyErr_GivenExceptionMatches(type, PyExc_Exception) == 0;
  }

  std::string sourceLineHere() const override {
    const pybind11::gil_scoped_acquire gil;
    PyObject* function = provided(Provided::kCurrentLine);
    return function == nullptr ? std::string{} : textOf(pybind11::reinterpret_borrow<pybind11::function>(function)());
  }

  std::vector<StackFrame> stackHere() const override {
    const pybind11::gil_scoped_acquire gil;
    std::vector<StackFrame> frames;
    auto frame = stolen(PyThreadState_GetFrame(PyThreadState_Get()));
    while (frame) {
      auto* const here = reinterpret_cast<PyFrameObject*>(frame.ptr());
      const auto code = stolen(PyFrame_GetCode(here));
      frames.push_back({textOf(code.attr("co_name")), textOf(code.attr("co_filename")), PyFrame_GetLineNumber(here)});
      frame = stolen(PyFrame_GetBack(here));
    }
    return frames;
  }

  bool hasFakeImplementation(const std::string& name) const override {
    const pybind11::gil_scoped_acquire gil;
    PyObject* function = provided(Provided::kHasFakeImplementation);
    return function != nullptr && pybind11::reinterpret_borrow<pybind11::function>(function)(name).cast<bool>();
  }

  void raise(ErrorKind kind, const std::string& message) const override {
    const pybind11::gil_scoped_acquire gil;
    PyObject* type = provided(kClasses.at(static_cast<std::size_t>(kind)));
    if (type != nullptr) {
      PyErr_SetString(type, message.c_str());
      throwPythonError();
    }
  }

  // Python has exception notes since 3.11.
  void raiseWithNote(const c10::Error& error, const std::string& note) const override {
    const pybind11::gil_scoped_acquire gil;
    const pybind11::object type = pybind11::reinterpret_borrow<pybind11::object>(PyExc_RuntimeError);
    if (!pybind11::hasattr(type, "add_note")) {
      return;
    }
    const char* message = torch::get_cpp_stacktraces_enabled() ? error.what() : error.what_without_backtrace();
    const pybind11::object raised = type(torch::processErrorMsg(message));
    raised.attr("add_note")(note);
    PyErr_SetObject(type.ptr(), raised.ptr());
    throwPythonError();
  }
};

}  // namespace

PyObject* provided(Provided what) noexcept {
  return objects().at(static_cast<std::size_t>(what));
}

void bindInterpreter(pybind11::module_& module) {
  module.def("provide", torch::wrap_pybind_function(provide));
  static const auto* python = new Python;
  setInterpreter(*python);
}

}  // namespace torchext::python
