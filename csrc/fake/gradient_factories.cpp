#include "gradient_factories.h"

#include <memory>
#include <vector>

#include <ATen/record_function.h>

#include "../torch_internals/autograd.h"
#include "storage/fake_factories.h"

namespace torchext {

namespace {

struct NodeContext final : at::ObserverContext {
  explicit NodeContext(c10::ArrayRef<c10::IValue> gradients) : factories{gradients} {}

  FactoriesOfCall factories;
};

// The context lives until the node has run.
std::unique_ptr<at::ObserverContext> beforeNode(const at::RecordFunction& node) {
  if (!isRunningPyTorchsNode()) {
    return nullptr;
  }
  const auto inputs = node.inputs();
  const std::vector<c10::IValue> gradients(inputs.begin(), inputs.end());
  return std::make_unique<NodeContext>(gradients);
}

at::CallbackHandle addObserver() {
  return at::addGlobalCallback(
      at::RecordFunctionCallback{&beforeNode}.needsInputs(true).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

}  // namespace

void makeGradientsFake(bool is_wanted) {
  static const at::CallbackHandle handle = addObserver();  // PyTorch guards its list of observers by a lock
  if (is_wanted) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

}  // namespace torchext
