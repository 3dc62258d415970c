#pragma once

// NOTE [The value at recording time]
//
// A recorded operator may read a real tensor: what a checkpoint holds, a table outside the model, the memory of a NumPy
// array. Its value is the one at recording time, as in eager execution, whatever happens to the tensor until the
// operator is replayed. The version counter does not show whether it has changed: `.data` has a counter of its own,
// fused optimizers and the kernel of batch normalization write without counting, NumPy, DLPack and `UntypedStorage`
// know of none, and inference tensors have none. What counts are the bytes:
//
//   * Up to kMaxCopiedBytes are copied. Copies of equal bytes are shared, so that a table that every layer reads is
//     kept once.
//   * Larger tensors are not, or recording would cost the memory that it is meant to save. The graph keeps the memory
//     itself, and a digest of what it showed; an operator that finds another one is not replayed. To take the digest is
//     to read the memory once, when the operator is recorded and again when it is replayed.
//   * Of tensors with a `__torch_dispatch__` the digest is taken, too, whatever their size: a copy would be of another
//     class. Wrappers have no memory, and only their version counter can show a change.

#include <cstddef>
#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/operator_name.h>

#include "digest.h"

namespace torchext {

// What is counted are the bytes between the first and the last element.
constexpr std::size_t kMaxCopiedBytes = std::size_t{1} << 20U;

// A tensor that was real, or a fake without a recorded value, when a recorded operator read it.
class ExternalTensor {
 public:
  // Raises RuntimeError when the storage of `tensor` is too small for it, as after `untyped_storage().resize_(0)`.
  explicit ExternalTensor(const at::Tensor& tensor);

  // Detached from autograd and from later changes to the metadata of the original. Its value is the recorded one once
  // `check()` has not raised.
  const at::Tensor& tensor() const noexcept {
    return tensor_;
  }

  // Raises RuntimeError, naming `op`, unless the value is still the one that was recorded.
  void check(const c10::OperatorName& op) const;

 private:
  at::Tensor tensor_;
  // Of what it showed when it was recorded. Without one, nobody else can write into it, or there is nothing to see.
  std::optional<Digest> digest_;
  // Of a wrapper, which has no memory of its own.
  std::optional<std::int64_t> version_;
};

}  // namespace torchext
