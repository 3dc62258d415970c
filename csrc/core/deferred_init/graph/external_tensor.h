#pragma once

// NOTE [The value at recording time]
//
// A recorded operator may read a real tensor: from a checkpoint, a table outside the model, the memory of a NumPy
// array. The value at recording time counts, as in eager execution, even if the tensor changes before the operator is
// replayed. The version counter does not detect all changes: `.data` has a separate counter, fused optimizers and the
// kernel of batch normalization write without counting, NumPy, DLPack and `UntypedStorage` bypass it, and inference
// tensors have no counter. So the bytes are compared:
//
//   * Up to kMaxCopiedBytes are copied. With the hook `ExternalValues`, equal copies are shared, so a table that every
//     layer reads is kept once.
//   * Larger tensors are not copied with the hook, because recording would cost the memory that it is meant to save.
//     The graph keeps the memory itself and a digest of its contents; an operator that finds another digest is not
//     replayed. Taking the digest reads the memory once at recording and once at replay.
//   * For tensors with a `__torch_dispatch__`, the digest is taken at any size: a copy would have another class.
//     Wrappers have no memory, and only their version counter can show a change.

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>

#include "../../hooks/hooks.h"

namespace torchext {

// Size limit of copies: the bytes between the first and the last element count.
constexpr std::size_t kMaxCopiedBytes = std::size_t{1} << 20U;

// A tensor that was real, or a fake without a recorded value, when a recorded operator read it.
class ExternalTensor {
 public:
  // Raises RuntimeError when the storage of `tensor` is too small for it, as after `untyped_storage().resize_(0)`.
  explicit ExternalTensor(const at::Tensor& tensor);

  // Detached from autograd and from later changes to the metadata of the original. It has the recorded value if
  // `check()` does not raise.
  const at::Tensor& tensor() const noexcept {
    return tensor_;
  }

  // Raises RuntimeError, naming `op`, unless the value is still the recorded one.
  void check(const c10::OperatorName& op) const;

 private:
  at::Tensor tensor_;
  // Empty for a copy, which no other code can write, and for a tensor without memory.
  IsUnchanged is_unchanged_;
  // The version of a wrapper, which has no memory.
  std::optional<std::int64_t> version_;
};

}  // namespace torchext
