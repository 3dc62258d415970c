#include <memory>
#include <string>

#include "kinds.h"
#include "refused_layout.h"

namespace torchext {

using at::Tensor;

namespace {

class QuantizedLayout final : public RefusedLayout {
 public:
  QuantizedLayout()
      : RefusedLayout{
            {"a quantized tensor", "use `dequantize()`"},
            {"aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized", "aten::quantize_per_"}} {}

  void checkCanBeFaked(const Tensor& tensor) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!tensor.is_quantized(),
                                "fake_like() expected a strided or sparse tensor, got a quantized one.");
  }

 protected:
  bool refuses(const Tensor& tensor) const override {
    return tensor.key_set().has(c10::DispatchKey::Quantized);
  }

  std::string describe(const Tensor& tensor) const override {
    return c10::str("a quantized tensor of shape ", tensor.sizes());
  }
};

}  // namespace

std::unique_ptr<const LayoutHandler> makeQuantizedLayout() {
  return std::make_unique<const QuantizedLayout>();
}

}  // namespace torchext
