#include "backend_meta.h"

#include <cstdint>

namespace torchext {

bool testBackendMeta(bool is_broken) {
  const auto make = [] {
    return c10::make_intrusive<c10::TensorImpl>(c10::DispatchKeySet{c10::DispatchKey::CPU},
                                                caffe2::TypeMeta::Make<std::uint8_t>(), c10::Device{c10::kCPU});
  };
  const auto impl = make();
  const auto meta = c10::make_intrusive<c10::BackendMeta>();
  impl->set_backend_meta(meta);
  const auto copy = is_broken ? make() : impl->shallow_copy_and_detach(/*version_counter=*/0, true);
  const auto other = make();
  other->shallow_copy_from(copy);
  return impl->get_backend_meta() == meta.get() && copy->get_backend_meta() == meta.get() &&
         other->get_backend_meta() == meta.get();
}

}  // namespace torchext
