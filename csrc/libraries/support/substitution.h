#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/Exception.h>

#include "pointer_numbers.h"
#include "sizes.h"

namespace torchext {

// The tensors and storages of one call, which live as long as this, and the substitutes with which a kernel is called
// instead. Each original has one. Pointers that functions return are valid until the next `add()`. For one thread.
class Substitution {
 public:
  // Return the substitute of `original`, or null.
  const at::Tensor* substituteOf(const at::Tensor& original) const {
    return tensors_.substituteOf(original.unsafeGetTensorImpl());
  }
  const c10::Storage* substituteOf(const c10::Storage& original) const {
    return storages_.substituteOf(original.unsafeGetStorageImpl());
  }

  // Return what `substitute` stands for, or null.
  const at::Tensor* originalOf(const c10::TensorImpl& substitute) const {
    return tensors_.originalOf(&substitute);
  }
  const c10::Storage* originalOf(const c10::Storage& substitute) const {
    return storages_.originalOf(substitute.unsafeGetStorageImpl());
  }

  // Returns the original of the first substitute on `storage`, or null. In linear time.
  const at::Tensor* originalWithSubstituteOn(const c10::Storage& storage) const {
    const auto& tensors = tensors_.substitutes;
    const auto found = std::find_if(tensors.begin(), tensors.end(), [&storage](const at::Tensor& tensor) {
      return tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
    });
    return found == tensors.end() ? nullptr : &tensors_.originals[toSize(found - tensors.begin())];
  }

  // Add a pair. Neither may be in another one.
  void add(const at::Tensor& original, const at::Tensor& substitute) {
    tensors_.add(original, original.unsafeGetTensorImpl(), substitute, substitute.unsafeGetTensorImpl());
  }
  void add(const c10::Storage& original, const c10::Storage& substitute) {
    storages_.add(original, original.unsafeGetStorageImpl(), substitute, substitute.unsafeGetStorageImpl());
  }

  // Return the tensors in the order in which they were added.
  const std::vector<at::Tensor>& originals() const noexcept {
    return tensors_.originals;
  }
  const std::vector<at::Tensor>& substitutes() const noexcept {
    return tensors_.substitutes;
  }

 private:
  template <typename Value>
  struct Pairs {
    std::vector<Value> originals;
    std::vector<Value> substitutes;
    PointerNumbers numbers_of_originals;
    PointerNumbers numbers_of_substitutes;

    void add(Value original, const void* key_of_original, Value substitute, const void* key_of_substitute) {
      TORCH_INTERNAL_ASSERT(numbers_of_originals.add(key_of_original).second);
      TORCH_INTERNAL_ASSERT(numbers_of_substitutes.add(key_of_substitute).second);
      originals.push_back(std::move(original));
      substitutes.push_back(std::move(substitute));
    }

    const Value* substituteOf(const void* original) const {
      const std::size_t number = numbers_of_originals.find(original);
      return number == substitutes.size() ? nullptr : &substitutes[number];
    }

    const Value* originalOf(const void* substitute) const {
      const std::size_t number = numbers_of_substitutes.find(substitute);
      return number == originals.size() ? nullptr : &originals[number];
    }
  };

  Pairs<at::Tensor> tensors_;
  Pairs<c10::Storage> storages_;
};

}  // namespace torchext
