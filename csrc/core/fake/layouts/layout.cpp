#include "layout.h"

#include <algorithm>

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

template <typename Predicate>
const LayoutHandler* findLayout(const Predicate& is_wanted) {
  const auto& layouts = hooks().layouts;
  const auto* found =
      std::find_if(layouts.begin(), layouts.end(), [&](const auto* layout) { return is_wanted(*layout); });
  return found == layouts.end() ? nullptr : *found;
}

thread_local int kernel_depth = 0;

}  // namespace

const LayoutHandler* layoutOf(const at::TensorBase& tensor) noexcept {
  return findLayout([&tensor](const LayoutHandler& layout) { return layout.has(tensor); });
}

const LayoutHandler* layoutOfCall(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  return findLayout([&](const LayoutHandler& layout) { return layout.concerns(op, arguments); });
}

void checkLayoutCanBeFaked(const Tensor& tensor) {
  for (const LayoutHandler* layout : hooks().layouts) {
    layout->checkCanBeFaked(tensor);
  }
}

void refuseLayouts(const OperatorHandle& op, const Stack& stack) {
  for (const LayoutHandler* layout : hooks().layouts) {
    layout->refuse(op, stack);
  }
}

InLayoutKernel::InLayoutKernel() noexcept {
  ++kernel_depth;
}

InLayoutKernel::~InLayoutKernel() {
  --kernel_depth;
}

bool isInLayoutKernel() noexcept {
  return kernel_depth > 0;
}

}  // namespace torchext
