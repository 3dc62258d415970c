#include <optional>
#include <string>
#include <utility>

#include <torch/csrc/jit/python/pybind_utils.h>

#include "../extensions/collectives/collectives.h"
#include "../extensions/values/assumed_values.h"
#include "../extensions/values/known_values.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

namespace py = pybind11;

// Python cannot inspect a reduction, so it gets the name.
py::object toPython(const c10::IValue& value) {
  const std::string reduction = nameOfReduction(value);
  return reduction.empty() ? torch::jit::toPyObject(value) : py::str(reduction);
}

// The function of `observe_collectives()`. The interpreter's lock guards it. Leaked: calls may be in flight until the
// process ends.
py::object& observingFunction() {
  static auto* function = new py::object{py::none()};
  return *function;
}

// Calls `observe(name, arguments)` before the collective. It raises an error, or returns a function to call with the
// results.
void callObserver(const c10::OperatorHandle& op,
                  c10::ArrayRef<c10::IValue> arguments,
                  c10::function_ref<c10::ArrayRef<c10::IValue>()> run) {
  const py::gil_scoped_acquire gil;
  const py::object function = observingFunction();
  const py::object on_return =
      function.is_none() ? function : function(op.schema().name(), asTuple(arguments, toPython));
  std::optional<c10::ArrayRef<c10::IValue>> results;
  {
    const py::gil_scoped_release no_gil;
    results = run();
  }
  if (!on_return.is_none()) {
    on_return(asTuple(*results, toPython));
  }
}

void observeByPython(py::object observe) {
  std::swap(observingFunction(), observe);
  observeCollectives(observingFunction().is_none() ? nullptr : &callObserver);
}

// Calls the methods of an `AssumedValues`, which is held for the life of the process.
class PythonAssumptions final : public Assumptions {
 public:
  PythonAssumptions(py::object values, at::Tensor masks, double number, bool has_lines)
      : values_{values.release()}, has_lines_{has_lines}, everywhere_{std::move(masks), ValueKind::kByMasks, number} {}

  double answer(const c10::OperatorHandle& op,
                c10::ScalarType dtype,
                std::optional<double> computed,
                ValueKind kind) override {
    const py::gil_scoped_acquire gil;
    return values_.attr("answer")(op.schema().name(), py::cast(dtype), computed, static_cast<int>(kind)).cast<double>();
  }

  void note(const c10::OperatorHandle& op, const std::string& shape, ValueKind kind) override {
    const py::gil_scoped_acquire gil;
    values_.attr("note_shape")(op.schema().name(), shape, static_cast<int>(kind));
  }

  LinePolicy policyHere() const override {
    if (!has_lines_) {
      return everywhere_;
    }
    const py::gil_scoped_acquire gil;
    const auto [masks, kind, number] = values_.attr("policy_here")().cast<std::tuple<at::Tensor, int, double>>();
    return {masks, static_cast<ValueKind>(kind), number};
  }

  std::pair<at::Tensor, ValueKind> positions(std::int64_t count,
                                             std::int64_t length,
                                             std::int64_t rows) const override {
    const py::gil_scoped_acquire gil;
    const auto [positions, kind] = values_.attr("positions")(count, length, rows).cast<std::pair<at::Tensor, int>>();
    return {positions, static_cast<ValueKind>(kind)};
  }

 private:
  py::handle values_;
  bool has_lines_;  // whether a line has a policy
  LinePolicy everywhere_;
};

void assumeByPython(const py::object& values, at::Tensor masks, double number, bool has_lines) {
  // NOLINTNEXTLINE(*-owning-memory): see above
  setAssumptions(new PythonAssumptions{values, std::move(masks), number, has_lines});
}

int kindOfValues(const std::vector<at::Tensor>& tensors) {
  const std::vector<c10::IValue> values(tensors.begin(), tensors.end());
  return static_cast<int>(standingOn(values));
}

void assumeValueOfKind(const at::Tensor& fake, const at::Tensor& value, int kind) {
  TORCH_CHECK_VALUE(0 < kind && kind <= static_cast<int>(kAllKinds), "assume_value(): ", kind,
                    " is not a kind of values.");
  assumeValue(fake, value, static_cast<ValueKind>(kind));
}

// Returns the known or assumed values of `fake`, if it has any.
std::optional<at::Tensor> assumedValue(const at::Tensor& fake) {
  const at::Tensor value = valueOf(fake, ValueKind::kAssumed);
  return value.defined() ? std::optional{value} : std::nullopt;
}

// Returns the kinds for policies of lines.
std::vector<int> byLines() {
  std::vector<int> kinds;
  for (unsigned bit = static_cast<unsigned>(ValueKind::kByLine) & ~1U; (bit & kAllKinds) != 0; bit <<= 1U) {
    kinds.push_back(static_cast<int>(bit | static_cast<unsigned>(ValueKind::kAssumed)));
  }
  return kinds;
}

}  // namespace

void bindCollectives(py::module_& module) {
  module.def("assume_values", torch::wrap_pybind_function(assumeByPython));  // holds the GIL
  bind(module, "assume_nothing", [] { setAssumptions(nullptr); });
  bind(module, "assumed_value", assumedValue);
  bind(module, "assume_value", assumeValueOfKind);
  bind(module, "kind_of_values", kindOfValues);
  bind(module, "value_for_reading", assumedValueOf);
  module.attr("ASSUMED_NUMBER") = kAssumedNumber;
  module.attr("BY_MASKS") = static_cast<int>(ValueKind::kByMasks);
  module.attr("BY_ROUTING") = static_cast<int>(ValueKind::kByRouting);
  module.attr("BY_LINES") = byLines();
  module.def("observe_collectives", torch::wrap_pybind_function(observeByPython));
}

}  // namespace torchext::python
