#include "factories_of_call.h"

#include <torchext/fake_tensor.h>

#include "../../libraries/support/stack_utils.h"

namespace torchext {

FactoriesOfCall::FactoriesOfCall(c10::ArrayRef<c10::IValue> arguments) {
  bool has_fake = false;
  bool has_deferred = false;
  forEachTensor(arguments, [&](const at::Tensor& tensor) {
    if (isFake(tensor)) {
      has_fake = true;
      has_deferred = has_deferred || tensor.key_set().has(c10::DispatchKey::DeferredInit);
    }
  });
  if (has_deferred) {
    deferred_.emplace(c10::DispatchKey::DeferredInit);
  } else if (has_fake) {
    fake_.emplace();
  }
}

}  // namespace torchext
