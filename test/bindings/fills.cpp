#include "../../csrc/libraries/fills/fill.h"

#include <mutex>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>

#include "../../csrc/libraries/fills/fill_method.h"
#include "bindings.h"

namespace torchext::python {

namespace {

Distribution distributionOf(bool is_normal) {
  return is_normal ? Distribution::Normal : Distribution::Uniform;
}

void checkArguments(const char* function, const at::Tensor& tensor, const at::Generator& generator) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(), function,
                    "() takes a contiguous tensor on the CPU, got one on ", tensor.device(), " with strides ",
                    tensor.strides(), ".");
  TORCH_CHECK_VALUE(generator.device().is_cpu(), function, "() takes a CPU generator, got one on ", generator.device(),
                    ".");
}

// Calls `draw` with the engine of `generator`, and advances the generator to the resulting state.
template <typename Draw>
auto drawFrom(const at::Generator& generator, const Draw& draw) {
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  const std::lock_guard lock(impl.mutex_);
  at::mt19937 engine = impl.engine();
  at::mt19937_data_pod state = engine.data();
  const auto result = draw(state);
  engine.set_data(state);
  impl.set_engine(engine);
  return result;
}

// `after` is called once per stretch.
bool fillTensor(const at::Tensor& tensor,
                bool is_normal,
                double first,
                double second,
                const at::Generator& generator,
                const std::optional<pybind11::function>& after) {
  checkArguments("fill_randomly", tensor, generator);
  const auto report = [&after](std::int64_t begin, std::int64_t end) {
    if (after) {
      const pybind11::gil_scoped_acquire gil;
      (*after)(begin, end);
    }
  };
  const pybind11::gil_scoped_release no_gil;
  const RandomFill fill{distributionOf(is_normal), tensor.scalar_type(), first, second};
  return drawFrom(generator, [&](at::mt19937_data_pod& engine) {
    return fillRandomly(fill, tensor.mutable_data_ptr(), tensor.numel(), engine, report);
  });
}

// With `only_counts` the tensor stays unchanged.
std::optional<std::uint64_t> fillTensorWithin(const at::Tensor& tensor,
                                              double mean,
                                              double std,
                                              double a,
                                              double b,
                                              const at::Generator& generator,
                                              bool only_counts) {
  checkArguments("fill_truncated", tensor, generator);
  const pybind11::gil_scoped_release no_gil;
  const auto fill = TruncatedFill::between(tensor.scalar_type(), mean, std, a, b);
  return drawFrom(generator, [&](at::mt19937_data_pod& engine) {
    return fillTruncated(fill, only_counts ? nullptr : tensor.mutable_data_ptr(), tensor.numel(), engine);
  });
}

}  // namespace

void bindFills(pybind11::module_& module) {
  module.def("fill_randomly", torch::wrap_pybind_function(fillTensor), pybind11::arg("tensor"),
             pybind11::arg("is_normal"), pybind11::arg("first"), pybind11::arg("second"), pybind11::arg("generator"),
             pybind11::arg("after") = pybind11::none());
  module.def("fill_truncated", torch::wrap_pybind_function(fillTensorWithin), pybind11::arg("tensor"),
             pybind11::arg("mean"), pybind11::arg("std"), pybind11::arg("a"), pybind11::arg("b"),
             pybind11::arg("generator"), pybind11::arg("only_counts") = false);
  bind(module, "is_fill_exact",
       [](bool is_normal, c10::ScalarType dtype) { return isOwnKernelExact(distributionOf(is_normal), dtype); });
  bind(module, "is_cut_fill_exact",
       [](bool is_normal, c10::ScalarType dtype) { return arePiecesExact(distributionOf(is_normal), dtype); });
}

}  // namespace torchext::python
