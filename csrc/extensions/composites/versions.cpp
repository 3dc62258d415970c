#include "versions.h"

#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/DimVector.h>
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

// NOTE [Versions that PyTorch does not count]
//
// Most operators that write have a kernel on `ADInplaceOrView`, which bumps the versions of their arguments. Some have
// none: foreach operators, outputs in lists, `out` overloads of a few composite operators, and factories that C++
// calls. There, the operators that the real kernel calls bump the versions: `copy_()` for each output, in a few kernels
// `resize_()` for those that change their size, and `fill_()` for a new tensor. Fakes do not run these kernels.
class UncountedVersions final : public CallFollower {
 public:
  // Returns true for such an operator, and for some that PyTorch counts.
  static bool concerns(const OperatorHandle& op) {
    return !op.hasKernelForDispatchKey(DispatchKey::ADInplaceOrView) && (op.schema().is_mutable() || fillsResult(op)) &&
           namespaceOf(op.operator_name()) == "aten";
  }

  // Finds the fakes that such an operator writes, before the call.
  UncountedVersions(const OperatorHandle& op, ArrayRef<IValue> arguments) {
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

  // Bumps their versions after the call, and that of the result on `stack` if `op` is such a factory.
  void finish(const Stack& stack) override {
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

  // Makes their values unknown after an error: the real kernel writes the tensors before the one that it refuses.
  void fail() noexcept override {
    for (const Tensor& tensor : written_) {
      forgetValues(IValue{tensor});
    }
  }

 private:
  std::vector<Tensor> written_;
  bool fills_result_ = false;
  std::vector<c10::DimVector> sizes_;  // if changes of sizes are counted
};

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

std::unique_ptr<CallFollower> followUncountedVersions(const OperatorHandle& op,
                                                      const Stack& stack,
                                                      c10::function_ref<bool()> decomposes) {
  return UncountedVersions::concerns(op) && !decomposes()
             ? std::make_unique<UncountedVersions>(op, argumentsOf(op, stack))
             : nullptr;
}

}  // namespace torchext
