#include <memory>
#include <string>

#include "kinds.h"
#include "refused_layout.h"

namespace torchext {

using at::Tensor;

namespace {

class UnknownLayout final : public RefusedLayout {
 public:
  UnknownLayout()
      : RefusedLayout{{"", "convert it with `to_dense()` before using it together with a fake tensor"}, {}} {}

  void checkCanBeFaked(const Tensor& tensor) const override {
    const bool is_strided = tensor.layout() == c10::kStrided && tensor.has_storage();
    TORCH_CHECK_NOT_IMPLEMENTED(is_strided || layoutOf(tensor) != nullptr,
                                "fake_like() expected a strided or sparse tensor, got the layout ", tensor.layout(),
                                ".");
  }

 protected:
  bool refuses(const Tensor& tensor) const override {
    return !tensor.has_storage() && !tensor.unsafeGetTensorImpl()->is_wrapped_number() && layoutOf(tensor) == nullptr;
  }

  std::string describe(const Tensor& tensor) const override {
    return c10::str("a tensor of layout ", tensor.layout(), " and type ", tensor.toString());
  }
};

}  // namespace

std::unique_ptr<const LayoutHandler> makeUnknownLayout() {
  return std::make_unique<const UnknownLayout>();
}

}  // namespace torchext
