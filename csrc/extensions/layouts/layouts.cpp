#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/errors.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/stack_utils.h"
#include "../support/registrations.h"
#include "sparse_fakes.h"

namespace torchext {

using c10::DispatchKey;

namespace {

// A kind of tensors that has no fakes.
struct Refused {
  std::string_view what;    // the end of "`op` returns", and of "`op` takes" if `key` is set
  std::string_view remedy;  // the end of the error
  // Name prefixes of the operators that make such a tensor from others.
  std::array<std::string_view, 3> makers;
  // The key of such tensors. `Undefined` if they have no storage: these are refused anyway.
  DispatchKey key;
  std::string_view name;   // in the error of `fake_like()`, if they have a key
  bool has_shape = false;  // whether the error about an argument can show its shape
};

[[noreturn]] void refuseCall(const OperatorHandle& op, const std::string& what, std::string_view remedy) {
  TORCHEXT_THROW(UnsupportedOperatorError, c10::str("Fake tensors are strided or sparse, but `", op.operator_name(),
                                                    "` ", what, "; ", remedy, "."));
}

// PyTorch's own checks are too late or missing: `NestedTensorImpl` raises when its sizes are read, and the Meta kernel
// of `quantize_per_tensor` returns floating-point numbers.
constexpr std::array<Refused, 3> kRefused{
    {{"a nested tensor of layout torch.strided",
      "use the layout torch.jagged, or `to_padded_tensor()`",
      {"aten::_nested_from_padded", "aten::_nested_tensor_from", "aten::_nested_view_from_buffer"},
      DispatchKey::NestedTensor,
      "nested"},
     {"a quantized tensor",
      "use `dequantize()`",
      {"aten::_empty_affine_quantized", "aten::_empty_per_channel_affine_quantized", "aten::quantize_per_"},
      DispatchKey::Quantized,
      "quantized",
      /*has_shape=*/true},
     {"a tensor of layout torch._mkldnn",
      "keep such tensors out of fake_mode() and deferred_init()",
      {"aten::to_mkldnn"},
      DispatchKey::Undefined,
      ""}}};

bool makes(const OperatorHandle& op, const Refused& kind) {
  return std::any_of(kind.makers.begin(), kind.makers.end(), [&op](std::string_view maker) {
    return !maker.empty() && op.schema().name().rfind(maker, 0) == 0;
  });
}

bool isOne(const Refused& kind, const Tensor& tensor) {
  return kind.key != DispatchKey::Undefined && tensor.key_set().has(kind.key);
}

Tensor fakeLikeSparse(const Tensor& tensor) {
  for (const Refused& kind : kRefused) {
    TORCH_CHECK_NOT_IMPLEMENTED(!isOne(kind, tensor), "fake_like() expected a strided or sparse tensor, got a ",
                                kind.name, " one.");
  }
  const bool is_strided = tensor.layout() == c10::kStrided && tensor.has_storage();
  TORCH_CHECK_NOT_IMPLEMENTED(is_strided || isSparse(tensor),
                              "fake_like() expected a strided or sparse tensor, got the layout ", tensor.layout(), ".");
  if (is_strided) {
    return {};
  }
  std::vector<Tensor> members = sparseMembersOf(tensor);
  for (Tensor& member : members) {
    member = fakeLike(member);
  }
  return makeSparseFake(tensor, members).set_requires_grad(tensor.requires_grad());
}

void refuse(const OperatorHandle& op, const Stack& stack) {
  const auto arguments = argumentsOf(op, stack);
  for (const Refused& kind : kRefused) {
    if (makes(op, kind)) {
      refuseCall(op, c10::str("returns ", kind.what), kind.remedy);
    }
    forEachTensor(arguments, [&](const Tensor& tensor) {
      if (isOne(kind, tensor)) {
        const std::string shape = kind.has_shape ? c10::str(" of shape ", tensor.sizes()) : "";
        refuseCall(op, c10::str("takes ", kind.what, shape), kind.remedy);
      }
    });
  }
  forEachTensor(arguments, [&op](const Tensor& tensor) {
    const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (!tensor.has_storage() && !is_number && !isSparse(tensor)) {
      refuseCall(op, c10::str("takes a tensor of layout ", tensor.layout(), " and type ", tensor.toString()),
                 "convert it with `to_dense()` before using it together with a fake tensor");
    }
  });
}

}  // namespace

void registerLayouts() {
  registerSparseCalls();
  Layouts& layouts = hooks().layouts;
  layouts.isSparse = &isSparse;
  layouts.isSparseFake = &isSparseFake;
  layouts.membersOf = &sparseMembersOf;
  layouts.fakeLike = &fakeLikeSparse;
  layouts.refuse = &refuse;
}

}  // namespace torchext
