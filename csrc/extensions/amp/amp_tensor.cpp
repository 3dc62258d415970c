#include "amp_tensor.h"

#include <typeinfo>

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

namespace torchext {

void wrap(const at::TensorBase& tensor) {
  checkCanBeWrapped(tensor);
  makeAmp(tensor);
}

void checkCanBeWrapped(const at::TensorBase& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (canBeMarked(impl)) {
    return;
  }
  const c10::BackendMeta& metadata = *impl.get_backend_meta();
  TORCH_CHECK(false, "wrap() cannot mark a tensor of shape ", tensor.sizes(), " on the device ", tensor.device(),
              ": its backend metadata (`c10::BackendMeta`) is already a `", c10::demangle(typeid(metadata).name()),
              "`. Wrap a copy without such metadata, or use `torchext.amp.autocast()`, which does not mark tensors.");
}

}  // namespace torchext
