#include "versions.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/irange.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "../values/known_bytes.h"

namespace torchext {

using c10::DispatchKey;

namespace {

const OperatorSet resizesOutputs{"resize their outputs by the operator `resize_`",
                                 {"aten::split_with_sizes_copy", "aten::unbind_copy"}};

const OperatorSet fillsResult{"fill a new tensor by an operator",
                              {"aten::arange", "aten::eye", "aten::full", "aten::linspace", "aten::logspace",
                               "aten::ones", "aten::range", "aten::zeros"}};

// Returns true for `_foreach_add_` and similar operators, which write to the tensors in their first argument, a list.
bool writesForeach(const OperatorHandle& op) {
  return op.schema().name().rfind("aten::_foreach_", 0) == 0 && isWritten(op.schema().arguments().front());
}

}  // namespace

void countVersions(at::TensorList written) {
  if (!c10::impl::tls_is_dispatch_key_excluded(DispatchKey::ADInplaceOrView)) {
    for (const Tensor& tensor : written) {
      if (tensor.defined()) {
        tensor.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

void countFill(const Tensor& result) {
  if (isFake(result) && result.layout() == c10::kStrided && !result.is_meta()) {
    countVersions(result);
  }
}

bool UncountedVersions::concerns(const OperatorHandle& op) {
  return !op.hasKernelForDispatchKey(DispatchKey::ADInplaceOrView) && (op.schema().is_mutable() || fillsResult(op)) &&
         namespaceOf(op.operator_name()) == "aten";
}

std::unique_ptr<CallFollower> UncountedVersions::follow(const OperatorHandle& op,
                                                        const Stack& stack,
                                                        c10::function_ref<bool()> decomposes) {
  return concerns(op) && !decomposes() ? std::make_unique<UncountedVersions>(op, argumentsOf(op, stack)) : nullptr;
}

UncountedVersions::UncountedVersions(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const bool is_foreach = writesForeach(op);
  const auto& schema = op.schema();
  for (const auto i : c10::irange(arguments.size())) {
    if (schema.arguments()[i].is_out() || (is_foreach && i == 0)) {
      forEachTensor(arguments[i], [this](const Tensor& tensor) {
        if (isFake(tensor)) {
          written_.push_back(tensor);
        }
      });
    }
  }
  fills_result_ = !schema.is_mutable() && fillsResult(op);
  if (!written_.empty() && resizesOutputs(op)) {
    for (const Tensor& tensor : written_) {
      sizes_.emplace_back(tensor.sizes());
    }
  }
}

void UncountedVersions::finish(const Stack& stack) {
  countVersions(written_);
  if (fills_result_) {
    countFill(stack.back().toTensor());
  }
  for (const auto i : c10::irange(sizes_.size())) {
    if (written_[i].sizes() != ArrayRef<int64_t>{sizes_[i]}) {
      countVersions(written_[i]);
    }
  }
}

void UncountedVersions::fail() noexcept {
  for (const Tensor& tensor : written_) {
    torchext::forgetValues(tensor);
  }
}

}  // namespace torchext
