#include "../fills/fill.h"

#include <mutex>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>

#include "../fills/exactness.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

Distribution distributionOf(bool is_normal) {
  return is_normal ? Distribution::Normal : Distribution::Uniform;
}

void checkArguments(const at::Tensor& tensor, const at::Generator& generator) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(),
                    "fill_randomly() takes a contiguous tensor on the CPU, found one on ", tensor.device(),
                    " with strides ", tensor.strides(), ".");
  TORCH_CHECK_VALUE(generator.device().is_cpu(), "fill_randomly() takes a CPU generator, found one on ",
                    generator.device(), ".");
}

// For our tests and benchmarks: the room has no user in Python. `after` is called once a stretch.
bool fillTensor(const at::Tensor& tensor,
                bool is_normal,
                double first,
                double second,
                const at::Generator& generator,
                const std::optional<pybind11::function>& after) {
  checkArguments(tensor, generator);
  const auto report = [&after](std::int64_t begin, std::int64_t end) {
    if (after) {
      const pybind11::gil_scoped_acquire gil;
      (*after)(begin, end);
    }
  };
  const pybind11::gil_scoped_release no_gil;
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  const std::lock_guard<std::mutex> lock(impl.mutex_);
  at::mt19937 engine = impl.engine();
  at::mt19937_data_pod state = engine.data();
  const RandomFill fill{distributionOf(is_normal), tensor.scalar_type(), first, second};
  if (!fillRandomly(fill, tensor.mutable_data_ptr(), tensor.numel(), state, report)) {
    return false;
  }
  engine.set_data(state);
  impl.set_engine(engine);
  return true;
}

bool isFillExact(bool is_normal, c10::ScalarType dtype) {
  return isOwnKernelExact(distributionOf(is_normal), dtype);
}

bool isCutExact(bool is_normal, c10::ScalarType dtype) {
  return arePiecesExact(distributionOf(is_normal), dtype);
}

}  // namespace

void bindFills(pybind11::module_& module) {
  module.def("fill_randomly", torch::wrap_pybind_function(fillTensor), pybind11::arg("tensor"),
             pybind11::arg("is_normal"), pybind11::arg("first"), pybind11::arg("second"), pybind11::arg("generator"),
             pybind11::arg("after") = pybind11::none());
  bind(module, "is_fill_exact", isFillExact);
  bind(module, "is_cut_fill_exact", isCutExact);
}

}  // namespace torchext::python
