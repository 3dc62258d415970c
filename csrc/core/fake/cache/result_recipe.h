#pragma once

#include <exception>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/DimVector.h>
#include <c10/util/SmallVector.h>

#include "../storage/storage_memory.h"
#include "call_key.h"

namespace torchext {

using Results = c10::SmallVector<c10::IValue, 4>;

// The storages and sizes of a call's arguments before the call.
class ArgumentsBefore {
 public:
  explicit ArgumentsBefore(c10::ArrayRef<const at::Tensor*> arguments);

  // Returns true if a call of `op` has moved an argument to another storage, or has resized a tensor that has elements.
  // PyTorch warns about such resizing each time, except for operators whose purpose is to change metadata.
  bool areMovedOrWarnedOf(const c10::OperatorHandle& op, c10::ArrayRef<const at::Tensor*> arguments) const;

 private:
  struct Entry {
    const c10::StorageImpl* storage;  // only compared; a new storage at the address of a freed one also counts as moved
    c10::DimVector sizes;
  };
  c10::SmallVector<Entry, 4> entries_;
};

// Describes how to recreate the results of a call for other tensors with the same metadata, or holds its refusal.
class ResultRecipe {
 public:
  // Creates the recipe of a call of `op` on `arguments` that returned `results`. `resizes`: whether the call changed
  // the metadata of its arguments. `makes_values`: whether the results may have known values although the arguments
  // have none. `scratch`: the temporary buffers of the kernel, or null. Returns null if the results cannot be recreated
  // from the arguments' metadata alone (`hasPureKernels()`).
  static std::shared_ptr<const ResultRecipe> learn(const c10::OperatorHandle& op,
                                                   c10::ArrayRef<const at::Tensor*> arguments,
                                                   bool resizes,
                                                   bool makes_values,
                                                   c10::ArrayRef<c10::IValue> results,
                                                   std::shared_ptr<const KernelScratch> scratch);

  // Returns the recipe of a call of `op` that real tensors refuse.
  static std::shared_ptr<const ResultRecipe> refusing(const c10::OperatorHandle& op, std::exception_ptr refusal);

  bool makesValues() const noexcept {
    return makes_values_;
  }

  bool refuses() const noexcept {
    return refusal_ != nullptr;
  }

  // Returns false if the recipe would resize a result of `detach()`, which must not be resized.
  bool canBeMade(c10::ArrayRef<const at::Tensor*> arguments) const;

  // Returns the results for `arguments` and resizes these as the call did, or raises the refusal.
  Results make(c10::ArrayRef<const at::Tensor*> arguments) const;

  // Returns the only result of a call that returns a new tensor. The recipe must neither refuse nor resize.
  at::Tensor makeOne(c10::ArrayRef<const at::Tensor*> arguments) const;

  // Resizes `arguments` as the call did. Enough for a call that returns only arguments.
  void resize(c10::ArrayRef<const at::Tensor*> arguments) const;

  const KernelScratch* scratch() const noexcept {
    return scratch_.get();
  }

  // Returns true if `make()` resizes arguments.
  bool resizes() const noexcept {
    return !resized_.empty();
  }

 private:
  friend class RecipeLearner;
  friend class RecipeMaker;
  friend class RecipeText;  // for checks of hits, in an extension

  struct TensorRecipe {
    enum class Source : std::uint8_t { kUndefined, kArgument, kViewOfArgument, kOnArgument, kNewStorage };
    Source source = Source::kUndefined;
    // The index of the argument or of the new storage.
    std::size_t number = 0;
    // The geometry and dtype of a view or of a tensor on a new storage. Has no storage.
    c10::intrusive_ptr<c10::TensorImpl> form;
  };

  struct ValueRecipe {
    bool is_list = false;
    std::vector<TensorRecipe> tensors;
    // A value that is neither a tensor nor a list of tensors.
    c10::IValue other;
  };

  // The metadata of an argument after the call.
  struct Resized {
    std::size_t number;
    c10::intrusive_ptr<c10::TensorImpl> form;
    std::size_t nbytes;
  };

  struct NewStorage {
    std::size_t nbytes;
    c10::Device device;
    bool is_pinned;
  };

  // Kept alive so that their identities, which are part of the call's key, stay unique.
  CallKernels kernels_;
  std::vector<ValueRecipe> values_;
  std::vector<NewStorage> new_storages_;
  std::vector<Resized> resized_;
  std::shared_ptr<const KernelScratch> scratch_;
  std::exception_ptr refusal_;
  bool makes_values_ = false;
};

}  // namespace torchext
