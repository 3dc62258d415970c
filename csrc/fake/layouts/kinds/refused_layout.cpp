#include "refused_layout.h"

#include <algorithm>
#include <utility>

#include "../../../support/stack_utils.h"
#include "../../calls/errors.h"

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

[[noreturn]] void refuseCall(const OperatorHandle& op, const std::string& what, std::string_view remedy) {
  TORCHEXT_THROW(UnsupportedOperatorError, c10::str("Fake tensors are strided or sparse, but `", op.operator_name(),
                                                    "` ", what, "; ", remedy, "."));
}

}  // namespace

RefusedLayout::RefusedLayout(Words words, std::vector<std::string_view> makers)
    : words_{words}, makers_{std::move(makers)} {}

void RefusedLayout::refuse(const OperatorHandle& op, const Stack& stack) const {
  const bool is_made = std::any_of(makers_.begin(), makers_.end(),
                                   [&op](std::string_view maker) { return op.schema().name().rfind(maker, 0) == 0; });
  if (is_made) {
    refuseCall(op, c10::str("returns ", words_.what), words_.remedy);
  }
  forEachTensor(stack, op.schema().arguments().size(), [&](const Tensor& tensor) {
    if (refuses(tensor)) {
      refuseCall(op, "takes " + describe(tensor), words_.remedy);
    }
  });
}

bool RefusedLayout::refuses(const Tensor& /*tensor*/) const {
  return false;
}

std::string RefusedLayout::describe(const Tensor& /*tensor*/) const {
  return std::string{words_.what};
}

}  // namespace torchext
