#include "composite_call.h"

#include <c10/core/GradMode.h>
#include <c10/util/irange.h>

#include "../../../libraries/support/stack_utils.h"
#include "../../fake/fake.h"
#include "../../fake/storage/fake_factories.h"
#include "../../fake/storage/fake_storage.h"
#include "../graph/op_graph.h"
#include "../replay/replay.h"
#include "real_call.h"

namespace torchext {

using c10::DispatchKeySet;

namespace {

// Returns true if all fakes in `arguments` are deferred.
bool haveRecords(const Stack& arguments) {
  return allTensors(arguments, [](const Tensor& tensor) { return !isFake(tensor) || valueOf(tensor) != nullptr; });
}

bool isDeferredIndex(const Tensor& tensor) {
  return c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/true) && valueOf(tensor) != nullptr;
}

// Replaces deferred integer tensors by real ones, except for arguments that results may alias. Returns true if there
// are any.
bool computeIndices(const OperatorHandle& op, Stack& arguments) {
  bool has_any = false;
  for (const auto i : c10::irange(arguments.size())) {
    if (op.schema().arguments()[i].alias_info() != nullptr) {
      continue;
    }
    arguments[i] = mapTensors(arguments[i], [&has_any](const Tensor& tensor) {
      if (!isDeferredIndex(tensor)) {
        return tensor;
      }
      has_any = true;
      return computeTensor(tensor);
    });
  }
  return has_any;
}

// A call that can be repeated.
class Composite {
 public:
  Composite(const OperatorHandle& op, DispatchKeySet below, Stack& stack)
      : op_{op},
        below_{below},
        stack_{stack},
        bottom_{stack.size() - op.schema().arguments().size()},
        arguments_(stack.begin() + static_cast<std::ptrdiff_t>(bottom_), stack.end()) {}

  void run() {
    if (tryCall() || tryWithRealFactories()) {
      return;
    }
    if (computeIndices(op_, arguments_) && (tryAgain() || tryWithRealFactories())) {
      return;
    }
    putBack();
    refuseToLoseGradients();
    callForReal(op_, below_, stack_);
  }

 private:
  // Returns false if the kernel reads the memory of a deferred tensor.
  bool tryCall() {
    try {
      op_.redispatchBoxed(below_, &stack_);
      return true;
    } catch (const c10::Error& error) {
      if (!isNoDataError(error) || !haveRecords(arguments_)) {
        throw;
      }
      return false;
    }
  }

  // For kernels that access the memory of tensors that they allocate: NOTE [Composites that read memory].
  bool tryWithRealFactories() {
    const RealFactoriesGuard guard;
    return tryAgain();
  }

  bool tryAgain() {
    putBack();
    return tryCall();
  }

  void refuseToLoseGradients() const {
    const auto needs_gradient = [](const Tensor& tensor) {
      return tensor.requires_grad() && valueOf(tensor) != nullptr;
    };
    TORCH_CHECK(!c10::GradMode::is_enabled() || !hasTensor(topOf(arguments_, arguments_.size()), needs_gradient), "`",
                op_.operator_name(),
                "` reads the values of a deferred tensor that requires gradients, which would be lost. Materialize the "
                "tensor first, or make the call under torch.no_grad().");
  }

  // Restores the arguments that a failed call has consumed.
  void putBack() {
    stack_.resize(bottom_);
    stack_.insert(stack_.end(), arguments_.begin(), arguments_.end());
  }

  const OperatorHandle& op_;
  const DispatchKeySet below_;
  Stack& stack_;
  const std::size_t bottom_;
  Stack arguments_;
};

}  // namespace

void callComposite(const OperatorHandle& op, DispatchKeySet below, Stack& stack) {
  Composite{op, below, stack}.run();
}

}  // namespace torchext
