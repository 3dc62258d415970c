#include "other_layouts.h"

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "../../../stack_utils.h"
#include "../../calls/errors.h"
#include "sparse_fakes.h"

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

constexpr const char* kRemedyOfNested = "use the layout torch.jagged, or `to_padded_tensor()`";
constexpr const char* kRemedyOfQuantized = "use `dequantize()`";

// The operators whose results cannot be told from their arguments.
struct Maker {
  std::string_view prefix;
  const char* what;
  const char* remedy;
};

constexpr std::array kMakers{
    Maker{"aten::_empty_affine_quantized", "a quantized tensor", kRemedyOfQuantized},
    Maker{"aten::_empty_per_channel_affine_quantized", "a quantized tensor", kRemedyOfQuantized},
    Maker{"aten::_nested_from_padded", "a nested tensor of layout torch.strided", kRemedyOfNested},
    Maker{"aten::_nested_tensor_from", "a nested tensor of layout torch.strided", kRemedyOfNested},
    Maker{"aten::_nested_view_from_buffer", "a nested tensor of layout torch.strided", kRemedyOfNested},
    Maker{"aten::quantize_per_", "a quantized tensor", kRemedyOfQuantized},
    Maker{"aten::to_mkldnn", "a tensor of layout torch._mkldnn", "leave it out"},
};

[[noreturn]] void refuse(const OperatorHandle& op, const std::string& what, const std::string& remedy) {
  TORCHEXT_THROW(UnsupportedOperatorError, c10::str("Fake tensors are strided or sparse, but `", op.operator_name(),
                                                    "` ", what, "; ", remedy, "."));
}

void checkMakes(const OperatorHandle& op) {
  const auto found = std::find_if(kMakers.begin(), kMakers.end(),
                                  [&op](const Maker& maker) { return op.schema().name().rfind(maker.prefix, 0) == 0; });
  if (found != kMakers.end()) {
    refuse(op, std::string{"returns "} + found->what, found->remedy);
  }
}

void checkTakes(const OperatorHandle& op, const Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (keys.has(c10::DispatchKey::NestedTensor)) {
    refuse(op, "takes a nested tensor of layout torch.strided", kRemedyOfNested);
  }
  if (keys.has(c10::DispatchKey::Quantized)) {
    refuse(op, c10::str("takes a quantized tensor of shape ", tensor.sizes()), kRemedyOfQuantized);
  }
  if (impl.has_storage() || isSparse(tensor) || impl.is_wrapped_number()) {
    return;
  }
  refuse(op, c10::str("takes a tensor of layout ", tensor.layout(), " and type ", tensor.toString()),
         "convert it with `to_dense()` before it meets a fake tensor");
}

}  // namespace

void refuseOtherLayouts(const OperatorHandle& op, const Stack& stack) {
  checkMakes(op);
  forEachTensor(stack, op.schema().arguments().size(), [&op](const Tensor& tensor) { checkTakes(op, tensor); });
}

}  // namespace torchext
