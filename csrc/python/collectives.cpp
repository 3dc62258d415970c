#include <cstddef>
#include <optional>
#include <string>

#include <c10/util/irange.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../fake/collectives/collectives.h"
#include "../fake/collectives/process_groups.h"
#include "../fake/values/assumed_values.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

namespace py = pybind11;

// Python has no way to look into a reduction, so it gets the name.
py::object toPython(const c10::IValue& value) {
  const std::string reduction = nameOfReduction(value);
  return reduction.empty() ? torch::jit::toPyObject(value) : py::str(reduction);
}

py::tuple toTuple(c10::ArrayRef<c10::IValue> values) {
  py::tuple converted(values.size());
  for (const auto i : c10::irange(values.size())) {
    converted[i] = toPython(values[i]);
  }
  return converted;
}

// Calls `observe(name, arguments)` before the call; it raises an error, or returns what is called with the results.
class PythonObserver final : public CollectiveObserver {
 public:
  explicit PythonObserver(py::object observe) : observe_{observe.release().ptr()} {}

  void observe(const c10::OperatorHandle& op,
               c10::ArrayRef<c10::IValue> arguments,
               c10::function_ref<c10::ArrayRef<c10::IValue>()> run) override {
    const py::gil_scoped_acquire gil;
    const auto function = py::reinterpret_borrow<py::object>(observe_);
    const py::object on_return = function(op.schema().name(), toTuple(arguments));
    std::optional<c10::ArrayRef<c10::IValue>> results;
    {
      const py::gil_scoped_release no_gil;
      results = run();
    }
    if (!on_return.is_none()) {
      on_return(toTuple(*results));
    }
  }

 private:
  PyObject* observe_;  // held for the life of the process
};

void observeByPython(const py::object& observe) {
  observeCollectives(observe.is_none() ? nullptr : new PythonObserver{observe});  // NOLINT(*-owning-memory): see above
}

PyObject* assume = nullptr;  // held for the life of the process, once it has been set

std::optional<double> assumeByPython(const c10::OperatorHandle& op,
                                     c10::ScalarType dtype,
                                     std::optional<double> computed) {
  const py::gil_scoped_acquire gil;
  if (assume == nullptr) {
    return std::nullopt;
  }
  const auto answer = py::reinterpret_borrow<py::object>(assume)(op.schema().name(), py::cast(dtype), computed);
  return answer.is_none() ? std::nullopt : std::optional{answer.cast<double>()};
}

void setAssumptionOfPython(const py::object& function) {
  assume = function.is_none() ? nullptr : py::object(function).release().ptr();
  setAssumption(function.is_none() ? nullptr : &assumeByPython);
}

}  // namespace

void bindCollectives(py::module_& module) {
  module.def("assume_values", torch::wrap_pybind_function(setAssumptionOfPython));
  module.def("observe_collectives", torch::wrap_pybind_function(observeByPython));
}

}  // namespace torchext::python
