#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/jit/python/pybind_utils.h>

#include "../extensions/cuda/fake_cuda.h"
#include "../extensions/memory/kernels/kernel_memory.h"
#include "bind.h"
#include "module.h"

namespace py = pybind11;

namespace torchext::python {

namespace {

// The steps of a kernel: the kind, the number of the block, workspace or result, and the bytes.
using KernelSteps = std::vector<std::tuple<std::string, std::int64_t, std::int64_t>>;

KernelSteps asTuples(c10::ArrayRef<KernelStep> steps) {
  static constexpr std::array<const char*, 4> kStepNames{"allocate", "free", "workspace", "result"};
  KernelSteps result;
  for (const KernelStep& step : steps) {
    result.emplace_back(kStepNames.at(static_cast<std::size_t>(step.kind)), step.block, step.bytes);
  }
  return result;
}

template <typename Slots>
torch::jit::Stack asStack(const py::tuple& values, const Slots& slots) {
  TORCH_CHECK_VALUE(values.size() == slots.size(), "The schema expects ", slots.size(), " values, got ", values.size(),
                    ".");
  torch::jit::Stack stack;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    stack.push_back(torch::jit::toIValue(values[i], slots[i].type()));
  }
  return stack;
}

// Returns the steps of the kernel of a call before and after its results. Arguments and results are given by position.
std::tuple<KernelSteps, KernelSteps> kernelMemory(const std::string& name,
                                                  const std::string& overload,
                                                  const py::tuple& args,
                                                  const py::tuple& results) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const torch::jit::Stack arguments = asStack(args, op.schema().arguments());
  const torch::jit::Stack values = asStack(results, op.schema().returns());
  const KernelMemory memory = kernelMemoryOf(op, arguments, values, fakeGpu());
  return {asTuples(memory.before_results), asTuples(memory.after_results)};
}

}  // namespace

void bindKernelMemory(py::module_& module) {
  module.def("kernel_memory", torch::wrap_pybind_function(kernelMemory));
}

}  // namespace torchext::python
