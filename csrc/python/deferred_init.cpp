#include "../deferred_init/deferred_init.h"

#include <vector>

#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

bool isDeferredTensor(const at::Tensor& tensor) {
  return isDeferred(tensor);
}

void materializeTensors(const std::vector<at::Tensor>& tensors) {
  materialize(tensors);
}

}  // namespace

void bindDeferredInit(pybind11::module_& module) {
  bind(module, "enter_deferred_init", enterDeferredInit);
  bind(module, "leave_deferred_init", leaveDeferredInit);
  bind(module, "is_deferred", isDeferredTensor);
  bind(module, "materialize", materializeTensors);
  bind(module, "evaluate", evaluate);
}

}  // namespace torchext::python
