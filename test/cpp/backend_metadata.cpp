// A tensor with backend metadata, like those of backends outside PyTorch. test/marks/test_marks.py compiles this file
// and passes `tensor._cdata`.

#include <c10/core/TensorImpl.h>

namespace {

struct MetadataOfSomeBackend final : c10::BackendMeta {};

}  // namespace

extern "C" __attribute__((visibility("default"))) void give_metadata(void* impl) {
  static_cast<c10::TensorImpl*>(impl)->set_backend_meta(c10::make_intrusive<MetadataOfSomeBackend>());
}

extern "C" __attribute__((visibility("default"))) int has_metadata(void* impl) {
  return dynamic_cast<MetadataOfSomeBackend*>(static_cast<c10::TensorImpl*>(impl)->get_backend_meta()) != nullptr ? 1
                                                                                                                  : 0;
}
