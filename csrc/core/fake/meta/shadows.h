#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "../../../libraries/support/substitution.h"

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
  // a tensor of another layout, returns a strided stand-in, which is not among the pairs.
  at::Tensor of(const at::Tensor& tensor);

  // Returns the shadow of `storage`.
  c10::Storage of(const c10::Storage& storage);

  // Returns all tensors and storages that have a shadow.
  const Substitution& pairs() const noexcept {
    return substitution_;
  }

 private:
  Kind kind_;
  Substitution substitution_;
};

}  // namespace torchext
