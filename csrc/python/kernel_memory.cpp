#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "../extensions/cuda/gpu.h"
#include "../extensions/memory/kernel_memory.h"
#include "../libraries/support/sizes.h"
#include "bind.h"
#include "interpreter.h"
#include "module.h"

namespace py = pybind11;

namespace torchext::python {

namespace {

template <typename... Arguments>
py::object callProvided(Provided what, const Arguments&... arguments) {
  return py::reinterpret_borrow<py::object>(provided(what))(arguments...);
}

py::tuple asNumbers(c10::IntArrayRef numbers) {
  return asTuple(numbers, [](std::int64_t number) { return py::int_{number}; });
}

py::object describe(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return py::none();
  }
  const py::handle dtype{reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()))};
  return callProvided(Provided::kKernelGeometry, asNumbers(tensor.sizes()), asNumbers(tensor.strides()), dtype,
                      tensor.storage_offset());
}

// Describes tensors, and converts other values.
py::object describe(const c10::IValue& value) {
  if (value.isTensor()) {
    return describe(value.toTensor());
  }
  if (value.isList()) {
    return asTuple(value.toListRef(), [](const c10::IValue& item) { return describe(item); });
  }
  return torch::jit::toPyObject(value);
}

py::tuple describeAll(c10::ArrayRef<c10::IValue> values) {
  return asTuple(values, [](const c10::IValue& value) { return describe(value); });
}

c10::SmallVector<KernelStep, 2> asSteps(const py::handle& list) {
  c10::SmallVector<KernelStep, 2> steps;
  for (const py::handle step : list) {
    const auto [kind, bytes, block] = step.cast<std::tuple<int, std::int64_t, std::int32_t>>();
    steps.push_back({static_cast<KernelStep::Kind>(kind), bytes, block});
  }
  return steps;
}

KernelMemory applyRule(const c10::OperatorHandle& op,
                       c10::ArrayRef<c10::IValue> arguments,
                       c10::ArrayRef<c10::IValue> results,
                       const GpuDescription& gpu) {
  const py::gil_scoped_acquire gil;
  const UntracedGuard untraced;
  const py::object steps = callProvided(Provided::kKernelSteps, c10::toString(op.operator_name()),
                                        describeAll(arguments), describeAll(results),
                                        std::tuple{gpu.major, gpu.multiprocessors, gpu.max_threads_per_multiprocessor});
  return {asSteps(steps[py::int_{0}]), asSteps(steps[py::int_{1}])};
}

}  // namespace

void bindKernelMemory(py::module_& module) {
  bind(module, "set_kernel_operators",
       [](const std::vector<std::string>& operators) { setKernelRules(operators, &applyRule); });
}

}  // namespace torchext::python
