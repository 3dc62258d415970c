#include "open_tensor_impl.h"

#include <cstdint>

namespace torchext {

bool testTensorKeys(bool is_broken) {
  const c10::DispatchKeySet keys{c10::DispatchKey::CPU};
  const c10::DispatchKeySet added{c10::DispatchKey::Conjugate};
  const auto impl =
      c10::make_intrusive<c10::TensorImpl>(keys, caffe2::TypeMeta::Make<std::uint8_t>(), c10::Device{c10::kCPU});
  const c10::DispatchKeySet before = impl->key_set();
  OpenTensorImpl::keysOf(*impl) = is_broken ? before : before | added;
  const bool is_given = impl->key_set() == (before | added) && impl->is_conj();
  OpenTensorImpl::keysOf(*impl) = before;
  return is_given && impl->key_set() == before && !impl->is_conj();
}

}  // namespace torchext
