#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include <c10/util/SmallVector.h>

#include "../../core/fake/calls/errors.h"
#include "../../libraries/support/stack_utils.h"
#include "kinds.h"

namespace torchext {

using c10::DispatchKey;

namespace {

// A kind of tensors that has no fakes.
struct Refused {
  std::string_view what;    // the end of "`op` returns", and of "`op` takes" if `key` is set
  std::string_view remedy;  // the end of the error
  // Name prefixes of the operators that make such a tensor from others.
  c10::SmallVector<std::string_view, 3> makers;
  // The key of such tensors; `Undefined` if UnknownLayout refuses them.
  DispatchKey key;
  std::string_view name;   // in the error of `fake_like()`
  bool has_shape = false;  // whether the error about an argument can show its shape
};

[[noreturn]] void refuseCall(const OperatorHandle& op, const std::string& what, std::string_view remedy) {
  TORCHEXT_THROW(UnsupportedOperatorError, c10::str("Fake tensors are strided or sparse, but `", op.operator_name(),
                                                    "` ", what, "; ", remedy, "."));
}

// PyTorch's own checks are too late or missing: `NestedTensorImpl` raises when its sizes are read, and the Meta kernel
// of `quantize_per_tensor` returns floating-point numbers.
class RefusedLayout final : public LayoutHandler {
 public:
  explicit RefusedLayout(Refused kind) : kind_{std::move(kind)} {}

  void checkCanBeFaked(const Tensor& tensor) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(!isOne(tensor), "fake_like() expected a strided or sparse tensor, got a ", kind_.name,
                                " one.");
  }

  void refuse(const OperatorHandle& op, const Stack& stack) const override {
    const bool is_made = std::any_of(kind_.makers.begin(), kind_.makers.end(),
                                     [&op](std::string_view maker) { return op.schema().name().rfind(maker, 0) == 0; });
    if (is_made) {
      refuseCall(op, c10::str("returns ", kind_.what), kind_.remedy);
    }
    forEachTensor(stack, op.schema().arguments().size(), [&](const Tensor& tensor) {
      if (isOne(tensor)) {
        const std::string shape = kind_.has_shape ? c10::str(" of shape ", tensor.sizes()) : "";
        refuseCall(op, c10::str("takes ", kind_.what, shape), kind_.remedy);
      }
    });
  }

 private:
  bool isOne(const Tensor& tensor) const {
    return kind_.key != DispatchKey::Undefined && tensor.key_set().has(kind_.key);
  }

  const Refused kind_;
};

// All tensors without a storage that no other layout has.
class UnknownLayout final : public LayoutHandler {
 public:
  void checkCanBeFaked(const Tensor& tensor) const override {
    const bool is_strided = tensor.layout() == c10::kStrided && tensor.has_storage();
    TORCH_CHECK_NOT_IMPLEMENTED(is_strided || layoutOf(tensor) != nullptr,
                                "fake_like() expected a strided or sparse tensor, got the layout ", tensor.layout(),
                                ".");
  }

  void refuse(const OperatorHandle& op, const Stack& stack) const override {
    forEachTensor(stack, op.schema().arguments().size(), [&](const Tensor& tensor) {
      const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
      if (!tensor.has_storage() && !is_number && layoutOf(tensor) == nullptr) {
        refuseCall(op, c10::str("takes a tensor of layout ", tensor.layout(), " and type ", tensor.toString()),
                   "convert it with `to_dense()` before using it together with a fake tensor");
      }
    });
  }
};

}  // namespace

// Leaked: threads may run operators until the process ends.
void registerRefusedLayouts() {
  auto& layouts = hooks().layouts;
  layouts.add(new RefusedLayout(
      Refused{"a nested tensor of layout torch.strided",
              "use the layout torch.jagged, or `to_padded_tensor()`",
              {"aten::_nested_from_padded", "aten::_nested_tensor_from", "aten::_nested_view_from_buffer"},
              DispatchKey::NestedTensor,
              "nested"}));
  layouts.add(new RefusedLayout(
      Refused{"a quantized tensor",
              "use `dequantize()`",
              {"aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized", "aten::quantize_per_"},
              DispatchKey::Quantized,
              "quantized",
              /*has_shape=*/true}));
  layouts.add(new RefusedLayout(Refused{"a tensor of layout torch._mkldnn",
                                        "keep such tensors out of fake_mode() and deferred_init()",
                                        {"aten::to_mkldnn"},
                                        DispatchKey::Undefined,
                                        "mkldnn"}));
  layouts.add(new UnknownLayout);
}

}  // namespace torchext
