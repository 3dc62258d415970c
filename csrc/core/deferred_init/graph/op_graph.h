#pragma once

// NOTE [The graph of recorded operators]
//
// Operators affect tensors only by writing storages. Everything else about a tensor (its storage, sizes, strides and
// offset) is metadata that the fake tensor itself carries. So the graph's data are storages, not tensors, and each
// write makes a new *value* of the storage that it writes:
//
//     a = torch.ones(2, 2)       S0 = ones()
//     b = a.view(-1)             (nothing: b shows the same storage as a)
//     b[0] = 5                   S1 = copy_(S0 at {no dimensions, offset 0}, 5)
//     c = a + a                  T0 = add(S1 at {2x2}, S1 at {2x2})
//     a.zero_()                  S2 = zero_(S1 at {2x2})
//
// A fake storage points to its latest value, a value to the operator that wrote it, and an operator to the values that
// it read. This makes deferral correct for views and in-place operators:
//
//   * `b` shows a later write to `a`, and `a` the write through `b` even if `b` is dropped, because both show S2;
//   * `c` is computed from S1, although the storage has a newer value: a value never changes;
//   * replaying the operators that a value depends on, in recording order, gives the value of eager execution, any
//     number of times, regardless of earlier replays;
//   * references point back in time only, so unreachable nodes are freed at once.
//
// `Parameter(t)`, `.data`, `.data = u`, `detach()`, `set_()`, `chunk()` and similar calls record nothing: they change
// which storage a tensor shows, and the tensor itself holds that.

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "../../../libraries/support/locks.h"
#include "../../fake/storage/fake_storage.h"
#include "../random/tape.h"
#include "../state/real_dispatch.h"
#include "external_tensor.h"

namespace torchext {

class OpNode;

// How a tensor shows its storage.
struct Geometry {
  c10::DimVector sizes;
  c10::DimVector strides;
  int64_t storage_offset = 0;
  caffe2::TypeMeta dtype;
  bool is_conj = false;
  bool is_neg = false;
  // NOTE [Zeros of forward AD]. In a replay their storage holds zeros.
  bool is_zero = false;

  static Geometry of(const at::Tensor& tensor);

  bool fits(const at::Tensor& tensor) const;

  // Returns true if both show the same bytes in the same order.
  bool operator==(const Geometry& other) const {
    return sizes == other.sizes && strides == other.strides && storage_offset == other.storage_offset &&
           dtype == other.dtype && is_conj == other.is_conj && is_neg == other.is_neg && is_zero == other.is_zero;
  }

  bool operator!=(const Geometry& other) const {
    return !(*this == other);
  }

  // Returns true if the elements fill a contiguous range of memory in order, unmodified.
  bool isContiguous() const;

  bool hasElements() const;

  // The bytes of all elements, including repeated ones.
  std::size_t nbytes() const;

  // The number of bytes from the beginning of the storage to the end of the last element.
  std::size_t bytesReached() const;

  // Makes a tensor on `storage`, which is real.
  at::Tensor makeTensor(c10::Storage storage) const;

  // Makes a real tensor with a new storage and arbitrary values.
  at::Tensor makeEmptyTensor(c10::Device device) const;
};

// A geometry that tensors may have in common: most operators of a constructor are on tensors of few shapes.
class SharedGeometry {
 public:
  // No sizes.
  SharedGeometry() = default;

  static SharedGeometry of(const at::Tensor& tensor);

  const Geometry& operator*() const noexcept {
    static const Geometry none;
    return shared_ == nullptr ? none : *shared_;
  }

 private:
  std::shared_ptr<const Geometry> shared_;
};

// Makes a real storage with arbitrary contents.
c10::Storage makeStorage(std::size_t nbytes, c10::Device device, bool is_pinned = false);

// Returns `nbytes` bytes of `storage`, which is real, as a tensor.
at::Tensor bytesAt(const c10::Storage& storage, std::size_t begin, std::size_t nbytes);

// The bytes of one storage between two writes.
class StorageValue final : public Provenance, public std::enable_shared_from_this<StorageValue> {
 public:
  // The contents of `storage` after `writer`, as the `output`th storage that it writes.
  StorageValue(std::shared_ptr<const OpNode> writer, std::size_t output, const c10::Storage& storage);

  // Existing bytes: the result of `torch.tensor()`. `constant` must not be written again.
  explicit StorageValue(c10::Storage constant);

  C10_DISABLE_COPY_AND_ASSIGN(StorageValue);
  ~StorageValue() override;

  // Null for a constant. Another thread may fold the value, so callers of this and of `constant()` must hold the lock
  // `kReplay`.
  const std::shared_ptr<const OpNode>& writer() const noexcept {
    checkHolds(LockRank::kReplay);
    return writer_;
  }

  std::size_t output() const noexcept {
    return output_;
  }

  // Null unless the value is a constant.
  const c10::Storage& constant() const noexcept {
    checkHolds(LockRank::kReplay);
    return constant_;
  }

  // The device of the storage when it was recorded.
  c10::Device device() const noexcept {
    return device_;
  }

  // The size of the storage.
  std::size_t nbytes() const noexcept {
    return nbytes_;
  }

  bool isPinned() const noexcept {
    return is_pinned_;
  }

  // Makes a real storage like that of the value, with arbitrary contents.
  c10::Storage makeEmptyStorage() const;

  // The number of consecutive writes of the same elements after construction, up to this value.
  std::uint32_t repeats() const noexcept {
    return repeats_;
  }
  void setRepeats(std::uint32_t repeats) noexcept {
    repeats_ = repeats;
  }

  // Returns false once its storage has been written again: then only operators that are already recorded read it.
  bool isCurrent() const noexcept {
    return is_current_.load(std::memory_order_relaxed);
  }
  void supersede() noexcept {
    is_current_.store(false, std::memory_order_relaxed);
  }

  // A constant with the same bytes, or null: `ComputedValues`. The caller holds the lock of replays.
  const std::shared_ptr<StorageValue>& computed() const noexcept {
    return computed_;
  }
  void setComputed(std::shared_ptr<StorageValue> constant) const noexcept {
    computed_ = std::move(constant);
  }

  // Turns a computed value into a constant, and releases the operators that led to it. The caller holds the lock
  // `kReplay`.
  void fold(c10::Storage constant);

 private:
  std::shared_ptr<const OpNode> writer_;
  std::uint32_t output_ = 0;
  std::uint32_t repeats_ = 0;
  c10::Device device_;
  bool is_pinned_ = false;
  std::atomic<bool> is_current_{true};
  std::size_t nbytes_;
  c10::Storage constant_;
  mutable std::shared_ptr<StorageValue> computed_;
};

using StorageValuePtr = std::shared_ptr<StorageValue>;

// Returns true if both are the same output of the same operator, or the same constant.
bool isSameValue(const StorageValue& a, const StorageValue& b);

// Returns the value of `storage`, or the one that `tensor` shows. Null if the bytes were never recorded.
StorageValuePtr valueOf(const c10::Storage& storage);
StorageValuePtr valueOf(const at::TensorBase& tensor);

// Sets the value of `storage`, which is fake. Its tensors are deferred from now on.
void setValue(const c10::Storage& storage, StorageValuePtr value);

// A tensor among the arguments of a recorded operator. One of `value`, `number`, `external` and `device` is set.
struct TensorArgument {
  // Empty for `number` and `external`.
  const Geometry& geometry() const noexcept {
    return *shared_geometry;
  }

  StorageValuePtr value;
  SharedGeometry shared_geometry;
  // A Python number, which reaches an operator that takes a tensor as a "wrapped number".
  std::unique_ptr<const c10::Scalar> number;
  // A tensor that had no recorded value when the operator was recorded: NOTE [The value at recording time].
  std::shared_ptr<const ExternalTensor> external;
  // The device of a tensor that is used for its metadata only, such as the argument of `zeros_like`.
  std::optional<c10::Device> device;
  // The position of an earlier argument that is the same tensor. Kernels test for that:
  // `native_multi_head_attention_cpu()` multiplies query, key and value at once, and an operator that resizes its `out`
  // reads an input that is the same tensor with its new shape, as in `torch.sum(x, 0, out=x)`.
  std::optional<std::uint32_t> same_as;

  static TensorArgument of(const at::Tensor& tensor);
  static TensorArgument metadataOf(const at::Tensor& tensor);
};

// A storage that a recorded operator writes.
struct WrittenStorage {
  // That of a returned tensor or a resized argument, according to the fake.
  const Geometry& geometry() const noexcept {
    return *shared_geometry;
  }

  // The position among the tensor arguments if `is_argument`, else among `returnedTensors()`.
  std::uint32_t position = 0;
  bool is_argument = false;
  // True for an `out` argument that had another size before.
  bool was_resized = false;
  SharedGeometry shared_geometry;
};

// Returns the tensors among the results of an operator, including undefined ones: a kernel may return an undefined
// tensor where its Meta kernel returned a defined one, as `native_batch_norm_backward` does for results outside its
// `output_mask`.
std::vector<at::Tensor> returnedTensors(c10::ArrayRef<c10::IValue> results);

// A recorded call. Immutable once a value refers to it.
class OpNode {
 public:
  // Records a call of `op` with the arguments on top of `stack`, which are copied, in this thread's state.
  OpNode(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  C10_DISABLE_COPY_AND_ASSIGN(OpNode);
  ~OpNode();

  // Adds a storage that the call writes, and returns its index in `written()`. Only before the node is shared.
  std::size_t addWritten(WrittenStorage written);

  // Sets the position where the call starts to draw. Only before the node is shared.
  void setTape(TapePositionPtr position) {
    tape_ = std::move(position);
  }

  // The order of calls in time, across all threads.
  std::uint64_t number() const noexcept {
    return number_;
  }

  const c10::OperatorHandle& op() const noexcept {
    return op_;
  }

  const std::vector<TensorArgument>& tensors() const noexcept {
    return tensors_;
  }

  c10::ArrayRef<WrittenStorage> written() const noexcept {
    return written_;
  }

  // Returns what the call writes to the storage of its tensor argument `tensor`, or null if it does not write it.
  const WrittenStorage* writtenTo(std::size_t tensor) const;

  const ThreadState& threadState() const noexcept {
    return *thread_state_;
  }

  // Null if the call draws nothing.
  const TapePositionPtr& tape() const noexcept {
    return tape_;
  }

  // The source line that recorded the call, or empty: `tracedSourceLine()`.
  std::string_view source() const noexcept {
    return source_ == nullptr ? std::string_view{} : *source_;
  }

  // The arguments, with a placeholder in place of each tensor.
  const torch::jit::Stack& arguments() const noexcept {
    return *arguments_;
  }

  // The arguments, with `tensors[i]` in place of the i-th tensor.
  torch::jit::Stack arguments(c10::ArrayRef<at::Tensor> tensors) const;

 private:
  std::uint64_t number_;
  c10::OperatorHandle op_;
  // As recorded, with a placeholder for each tensor, so that the graph keeps no fake alive.
  std::shared_ptr<const torch::jit::Stack> arguments_;
  std::vector<TensorArgument> tensors_;
  c10::SmallVector<WrittenStorage, 1> written_;
  std::shared_ptr<const ThreadState> thread_state_;
  TapePositionPtr tape_;
  std::unique_ptr<const std::string> source_;
};

}  // namespace torchext
