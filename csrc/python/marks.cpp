#include <ATen/core/Tensor.h>

#include "../marks/tensor_marks.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

namespace {

bool isMarkedTensor(const at::Tensor& tensor) {
  return marksOf(*tensor.unsafeGetTensorImpl()) != nullptr;
}

at::Tensor withoutItsMarks(const at::Tensor& tensor) {
  return withoutMarks(tensor);
}

}  // namespace

void bindMarks(pybind11::module_& module) {
  bind(module, "is_marked", isMarkedTensor);
  bind(module, "without_marks", withoutItsMarks);
  bind(module, "live_marks", liveMarks);
  bind(module, "drop_stale_demands", dropStaleDemands);
}

}  // namespace torchext::python
