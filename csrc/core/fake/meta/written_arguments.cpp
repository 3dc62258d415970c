#include "written_arguments.h"

#include <algorithm>

#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/TensorImpl.h>

#include "../../../libraries/support/stack_utils.h"
#include "../../hooks/hooks.h"
#include "../calls/errors.h"
#include "../calls/op_traits.h"
#include "../storage/fake_tensor_impl.h"

namespace torchext {

namespace {

// Changes the sizes, strides and storage size of a tensor. Its storage offset stays.
void resize(const Tensor& fake, c10::IntArrayRef sizes, c10::IntArrayRef strides, std::size_t nbytes) {
  const c10::TensorImpl& impl = *fake.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys{c10::computeDispatchKey(fake.scalar_type(), c10::kStrided, c10::kMeta)};
  auto form = c10::make_intrusive<c10::TensorImpl>(keys | (impl.key_set() & kLazyBits), impl.dtype(), c10::kMeta);
  form->set_sizes_and_strides(sizes, strides, impl.storage_offset());
  const std::size_t needed =
      at::detail::computeStorageNbytes(sizes, strides, fake.itemsize(), toSize(impl.storage_offset()));
  FakeTensorImpl::resizeLike(*fake.unsafeGetTensorImpl(), *form,
                             std::max({fake.storage().nbytes(), form->numel() == 0 ? 0 : needed, nbytes}));
}

void resizeLike(const Tensor& fake, const Tensor& real) {
  resize(fake, real.sizes(), real.strides(), real.storage().nbytes());
}

bool mayChangeShape(const OperatorHandle& op) {
  return op.hasTag(at::Tag::inplace_view) || hasOut(op) || namespaceOf(op.operator_name()) != "aten";
}

void resizeByMeta(const OperatorHandle& op, const Tensor& fake, const Tensor& shadow) {
  // The message of a TensorIterator (`TensorIteratorBase::mark_resize_outputs()`), which most of these operators use.
  TORCH_CHECK(fake.sizes() == shadow.sizes() || mayChangeShape(op), "output with shape ", fake.sizes(),
              " doesn't match the broadcast shape ", shadow.sizes());
  FakeTensorImpl::resizeLike(*fake.unsafeGetTensorImpl(), *shadow.unsafeGetTensorImpl(), shadow.storage().nbytes());
}

}  // namespace

void resizeWritten(
    const OperatorHandle& op, const Tensor& fake, const Tensor& shadow, const IValue* real, bool has_sizes) {
  if (real == nullptr) {
    resizeByMeta(op, fake, shadow);
  } else if (!real->isTensor()) {
    return;
  } else if (has_sizes) {
    resizeLike(fake, real->toTensor());
  } else if (shadow.sizes() != fake.sizes()) {
    resize(fake, shadow.sizes(), hooks().trials.stridesLike(real->toTensor(), shadow), shadow.storage().nbytes());
  } else {
    TORCHEXT_THROW(UnsupportedOperatorError,
                   c10::str("`", op.operator_name(), "` resizes an argument of shape ", fake.sizes(),
                            ", but the call is too large to determine the new shape. Pass an argument that already has "
                            "the new shape, or make the call on real tensors."));
  }
}

}  // namespace torchext
