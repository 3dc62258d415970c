// The loops of metadata_getters.py, which compiles this file. Each returns the nanoseconds of one call.

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include <torch/extension.h>

namespace {

// Makes the compiler believe that `value` is used and that all memory may have changed.
template <typename T>
void keep(const T& value) {
  asm volatile("" : : "g"(&value) : "memory");
}

template <typename Call>
std::function<double(const at::Tensor&, std::int64_t)> timed(Call call) {
  return [call](const at::Tensor& tensor, std::int64_t repeats) {
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < repeats; ++i) {
      keep(call(tensor));
    }
    const std::chrono::duration<double, std::nano> elapsed = std::chrono::steady_clock::now() - start;
    return elapsed.count() / static_cast<double>(repeats);
  };
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("dim", timed([](const at::Tensor& tensor) { return tensor.dim(); }));
  module.def("numel", timed([](const at::Tensor& tensor) { return tensor.numel(); }));
  module.def("size", timed([](const at::Tensor& tensor) { return tensor.size(0); }));
  module.def("sizes", timed([](const at::Tensor& tensor) { return tensor.sizes(); }));
  module.def("strides", timed([](const at::Tensor& tensor) { return tensor.strides(); }));
  module.def("dtype", timed([](const at::Tensor& tensor) { return tensor.scalar_type(); }));
  module.def("device", timed([](const at::Tensor& tensor) { return tensor.device(); }));
  module.def("is_contiguous", timed([](const at::Tensor& tensor) { return tensor.is_contiguous(); }));
  module.def("requires_grad", timed([](const at::Tensor& tensor) { return tensor.requires_grad(); }));
  module.def("resize_", timed([](const at::Tensor& tensor) { return &tensor.resize_(tensor.sizes()); }));
}
