#include "../deferred_init/deferred_init.h"
#include "../deferred_init/materialize.h"

#include <optional>
#include <vector>

#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

bool isDeferredTensor(const at::Tensor& tensor) {
  return isDeferred(tensor);
}

using Tensors = std::vector<at::Tensor>;

// The arguments of torchext.deferred_init.materialize_module(), taken apart. `on_done` is called once a storage.
void materializeTensors(const Tensors& placed,
                        const Tensors& others,
                        const std::optional<at::Device>& device,
                        const std::optional<at::ScalarType>& dtype,
                        const std::optional<pybind11::function>& on_done) {
  const auto report = [&on_done] {
    if (on_done) {
      const pybind11::gil_scoped_acquire gil;
      (*on_done)();
    }
  };
  const pybind11::gil_scoped_release no_gil;
  materialize(placed, others, {{device, dtype}, report});
}

}  // namespace

void bindDeferredInit(pybind11::module_& module) {
  bind(module, "enter_deferred_init", enterDeferredInit);
  bind(module, "leave_deferred_init", leaveDeferredInit);
  bind(module, "is_deferred", isDeferredTensor);
  module.def("materialize", torch::wrap_pybind_function(materializeTensors), pybind11::arg("placed"),
             pybind11::arg("others") = Tensors{}, pybind11::arg("device") = pybind11::none(),
             pybind11::arg("dtype") = pybind11::none(), pybind11::arg("on_done") = pybind11::none());
  bind(module, "evaluate", evaluate);
}

}  // namespace torchext::python
