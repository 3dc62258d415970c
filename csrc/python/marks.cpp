#include <ATen/core/Tensor.h>

#include "../extensions/marks/tensor_marks.h"
#include "bind.h"
#include "module.h"

namespace torchext::python {

void bindMarks(pybind11::module_& module) {
  bind(module, "is_marked", [](const at::Tensor& tensor) { return marksOf(*tensor.unsafeGetTensorImpl()) != nullptr; });
  bind(module, "without_marks", [](const at::Tensor& tensor) { return withoutMarks(tensor); });
  bind(module, "drop_stale_demands", dropStaleDemands);
}

}  // namespace torchext::python
