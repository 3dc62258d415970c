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
  TORCH_CHECK(false,
              "wrap() marks a tensor in the place that PyTorch has for the metadata of a backend (`c10::BackendMeta`), "
              "but there is a `",
              c10::demangle(typeid(metadata).name()), "` already in that of a tensor of shape ", tensor.sizes(),
              " on the device ", tensor.device(),
              ", and there is room for one only. Wrap a copy without such metadata, or use a region, "
              "`torchext.amp.autocast()`, which needs no marks.");
}

}  // namespace torchext
