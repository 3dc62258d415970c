#pragma once

#include <exception>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "../storage/storage_memory.h"

namespace torchext {

using Results = c10::SmallVector<c10::IValue, 4>;

// How to make the results of a call again, for other tensors with the same metadata, or why there are none.
class ResultRecipe {
 public:
  // Learns from a call of `op` on `arguments` that has made `results`. Returns null if the results cannot be made from
  // the arguments and their metadata alone. `scratch` is what the kernel needs besides, or null.
  static std::shared_ptr<const ResultRecipe> learn(const c10::OperatorHandle& op,
                                                   c10::ArrayRef<const at::Tensor*> arguments,
                                                   c10::ArrayRef<c10::IValue> results,
                                                   std::shared_ptr<const KernelScratch> scratch);

  // Returns the recipe of a call of `op` that real tensors refuse.
  static std::shared_ptr<const ResultRecipe> refusing(const c10::OperatorHandle& op, std::exception_ptr refusal);

  bool refuses() const noexcept {
    return refusal_ != nullptr;
  }

  // Returns the results for `arguments`, or raises the refusal.
  Results make(c10::ArrayRef<const at::Tensor*> arguments) const;

  const KernelScratch* scratch() const noexcept {
    return scratch_.get();
  }

 private:
  friend class RecipeLearner;
  friend class RecipeMaker;

  struct TensorRecipe {
    enum class Source : std::uint8_t { kUndefined, kArgument, kViewOfArgument, kNewStorage };
    Source source = Source::kUndefined;
    // The index of the argument, or of the new storage.
    std::size_t number = 0;
    // The geometry and the dtype of a view, or of a tensor on a new storage. Has no storage itself.
    c10::intrusive_ptr<c10::TensorImpl> form;
  };

  struct ValueRecipe {
    bool is_list = false;
    std::vector<TensorRecipe> tensors;
    // A value that is neither a tensor nor a list of tensors.
    c10::IValue other;
  };

  struct NewStorage {
    std::size_t nbytes;
    c10::Device device;
  };

  // Kept alive so that its identity, which is part of the call's key, stays unique.
  c10::KernelFunction kernel_;
  std::vector<ValueRecipe> values_;
  std::vector<NewStorage> new_storages_;
  std::shared_ptr<const KernelScratch> scratch_;
  std::exception_ptr refusal_;
};

}  // namespace torchext
