#include "amp_tensor.h"

namespace torchext {

using c10::DispatchKeySet;
using c10::TensorImpl;

namespace {

struct CleaningMark final : c10::BackendMeta {};

const c10::intrusive_ptr<c10::BackendMeta>& sharedMark() {
  static const c10::intrusive_ptr<c10::BackendMeta> mark = c10::make_intrusive<CleaningMark>();
  return mark;
}

// PyTorch has no function that gives a tensor a key. [class.protected] lets a derived class name the member of its
// base, and the pointer fits any TensorImpl.
struct KeySet : TensorImpl {
  static constexpr DispatchKeySet TensorImpl::* member() {
    return &KeySet::key_set_;
  }
};

DispatchKeySet& keysOf(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->*KeySet::member();
}

}  // namespace

const c10::BackendMeta* cleaningMark() {
  static const c10::BackendMeta* const mark = sharedMark().get();
  return mark;
}

// Each writes only what changes: arguments that come back as results may be other threads' too.
void makeAmp(const at::TensorBase& tensor) {
  if (isToBeCleaned(tensor)) {
    tensor.unsafeGetTensorImpl()->set_backend_meta(nullptr);
  } else if (!isAmp(tensor)) {
    keysOf(tensor) = keysOf(tensor).add(kAmpKey);
  }
}

void markToBeCleaned(const at::TensorBase& tensor) {
  // What is somebody else's stays: then the tensor is none of ours.
  if (tensor.unsafeGetTensorImpl()->get_backend_meta() == nullptr) {
    tensor.unsafeGetTensorImpl()->set_backend_meta(sharedMark());
    keysOf(tensor) = keysOf(tensor).add(kAmpKey);
  }
}

void makeOrdinary(const at::TensorBase& tensor) {
  if (isToBeCleaned(tensor)) {
    tensor.unsafeGetTensorImpl()->set_backend_meta(nullptr);
  }
  if (isAmp(tensor)) {
    keysOf(tensor) = keysOf(tensor).remove(kAmpKey);
  }
}

}  // namespace torchext
