#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "../cache/pointer_numbers.h"

namespace torchext {

// Returns a real tensor with the value of the wrapped number `number`. A fake one is zero: it is the tangent of a
// number in forward AD (`2 * dual`).
at::Tensor realNumber(const at::Tensor& number);

// Maps the storages and tensors of one call to their shadows, with which its Meta kernel is called. Shadows live as
// long as the call.
class Shadows {
 public:
  enum class Kind : std::uint8_t {
    kMeta,  // on the meta device
    kFake,  // fakes on the device of the original: NOTE [Fake implementations]
  };

  explicit Shadows(Kind kind) : kind_{kind} {}

  // Returns the shadow of `tensor`, always the same one. A real tensor also has a shadow: only its metadata matter. For
  // a tensor of another layout, returns a strided stand-in, which `originalOf()` does not find.
  at::Tensor of(const at::Tensor& tensor);

  // Returns the shadow of `storage`.
  c10::Storage of(const c10::Storage& storage);

  // Returns the tensor whose shadow is `shadow`, or an undefined tensor.
  at::Tensor originalOf(const c10::TensorImpl& shadow) const;

  // Returns a tensor argument on `storage`, or null.
  const at::Tensor* findTensorOn(const c10::Storage& storage) const;

  // Returns the storage whose shadow is `shadow`, or creates a fake storage on `device` for `shadow`.
  c10::Storage originalOf(const c10::Storage& shadow, c10::Device device);

 private:
  // Pairs of originals and shadows.
  template <typename Value>
  class Pairs {
   public:
    const Value* shadowOf(const void* original) const {
      const std::size_t number = originals_.find(original);
      return number == shadow_values_.size() ? nullptr : &shadow_values_[number];
    }

    const Value* originalOf(const void* shadow) const {
      const std::size_t number = shadows_.find(shadow);
      return number == original_values_.size() ? nullptr : &original_values_[number];
    }

    void add(Value original, const void* original_key, Value shadow, const void* shadow_key) {
      originals_.add(original_key);
      shadows_.add(shadow_key);
      original_values_.push_back(std::move(original));
      shadow_values_.push_back(std::move(shadow));
    }

    const std::vector<Value>& originals() const noexcept {
      return original_values_;
    }

   private:
    PointerNumbers originals_;
    PointerNumbers shadows_;
    std::vector<Value> original_values_;
    std::vector<Value> shadow_values_;
  };

  void add(const at::Tensor& original, const at::Tensor& shadow);
  void add(const c10::Storage& original, const c10::Storage& shadow);

  Kind kind_;
  Pairs<at::Tensor> tensors_;
  Pairs<c10::Storage> storages_;
};

}  // namespace torchext
