#include "layout.h"

#include <algorithm>
#include <utility>

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

using Layouts = std::vector<std::unique_ptr<const LayoutHandler>>;

Layouts& layouts() {
  static auto* layouts = new Layouts;  // leaked: threads may run operators until the process ends
  return *layouts;
}

template <typename Predicate>
const LayoutHandler* findLayout(const Predicate& is_wanted) {
  const auto found =
      std::find_if(layouts().begin(), layouts().end(), [&](const auto& layout) { return is_wanted(*layout); });
  return found == layouts().end() ? nullptr : found->get();
}

thread_local int kernel_depth = 0;

}  // namespace

bool LayoutHandler::has(const at::TensorBase& /*tensor*/) const noexcept {
  return false;
}

void LayoutHandler::checkCanBeFaked(const Tensor& /*tensor*/) const {}

bool LayoutHandler::isFake(const at::TensorBase& /*tensor*/) const {
  return false;
}

std::vector<Tensor> LayoutHandler::membersOf(const Tensor& /*tensor*/) const {
  return {};
}

Tensor LayoutHandler::fakeOf(const Tensor& /*tensor*/, at::ArrayRef<Tensor> /*members*/) const {
  return {};
}

void LayoutHandler::refuse(const OperatorHandle& /*op*/, const Stack& /*stack*/) const {}

bool LayoutHandler::concerns(const OperatorHandle& /*op*/, c10::ArrayRef<c10::IValue> /*arguments*/) const {
  return false;
}

void LayoutHandler::check(const OperatorHandle& /*op*/, const Stack& /*stack*/) const {}

void LayoutHandler::run(const OperatorHandle& /*op*/, Stack& /*stack*/) const {}

void registerLayout(std::unique_ptr<const LayoutHandler> layout) {
  layouts().push_back(std::move(layout));
}

const LayoutHandler* layoutOf(const at::TensorBase& tensor) noexcept {
  return findLayout([&tensor](const LayoutHandler& layout) { return layout.has(tensor); });
}

const LayoutHandler* layoutOfCall(const OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  return findLayout([&](const LayoutHandler& layout) { return layout.concerns(op, arguments); });
}

void checkLayoutCanBeFaked(const Tensor& tensor) {
  for (const auto& layout : layouts()) {
    layout->checkCanBeFaked(tensor);
  }
}

void refuseLayouts(const OperatorHandle& op, const Stack& stack) {
  for (const auto& layout : layouts()) {
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
