#include <memory>

#include "kinds.h"
#include "refused_layout.h"

namespace torchext {

using at::Tensor;

namespace {

class NestedLayout final : public RefusedLayout {
 public:
  NestedLayout()
      : RefusedLayout{
            {"a nested tensor of layout torch.strided", "use the layout torch.jagged, or `to_padded_tensor()`"},
            {"aten::_nested_from_padded", "aten::_nested_tensor_from", "aten::_nested_view_from_buffer"}} {}

  void checkCanBeFaked(const Tensor& tensor) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_nested(),
                                "fake_like() expected a strided or sparse tensor, got a nested one.");
  }

 protected:
  bool refuses(const Tensor& tensor) const override {
    return tensor.key_set().has(c10::DispatchKey::NestedTensor);
  }
};

}  // namespace

std::unique_ptr<const LayoutHandler> makeNestedLayout() {
  return std::make_unique<const NestedLayout>();
}

}  // namespace torchext
