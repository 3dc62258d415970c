#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include "../../../libraries/support/sizes.h"
#include "pointer_numbers.h"

namespace torchext {

// The tensors and storages of one call, and the substitutes with which a kernel is called instead: meta tensors, zeros,
// smaller stand-ins, real tensors. Each original has one substitute, so what is shared stays shared. Lookups take
// constant time. Holds all of them until it is destroyed. For one thread.
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

  // Return the first original, or the original of the first substitute, that is on `storage`, or null.
  const at::Tensor* originalOn(const c10::Storage& storage) const {
    return tensors_.originalWith(tensors_.originals, storage);
  }
  const at::Tensor* originalOfOneOn(const c10::Storage& storage) const {
    return tensors_.originalWith(tensors_.substitutes, storage);
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
      numbers_of_originals.add(key_of_original);
      numbers_of_substitutes.add(key_of_substitute);
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

    const Value* originalWith(const std::vector<Value>& values, const c10::Storage& storage) const {
      const auto found = std::find_if(values.begin(), values.end(), [&storage](const Value& value) {
        return value.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
      });
      return found == values.end() ? nullptr : &originals[toSize(found - values.begin())];
    }
  };

  Pairs<at::Tensor> tensors_;
  Pairs<c10::Storage> storages_;
};

}  // namespace torchext
