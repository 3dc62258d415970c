#pragma once

// NOTE [Known values]
//
// `torch.tensor([3, 1, 2])` is fake inside fake_mode(), but its values are known, and programs rely on them: optimizers
// read their step counters with `item()`, other programs cut a batch to its longest sequence, or look for image tokens.
// So a fake storage of at most kMaxKnownBytes may have known values, in real CPU memory, regardless of the claimed
// device:
//
//   * `torch.tensor()`, factories (except `empty` and random ones) and fills (`zero_`) create values.
//   * `fake_like()` and copies of real tensors and of fakes copy values.
//   * An operator whose tensor arguments all have known values is also run on the values. Its results and writes are
//     then known, and it may read values (`item`, `equal`, `nonzero`).
//   * Values written to a part of a storage are known if it contains integers or has values, even if the rest is
//     unknown.
//   * Any other operator that writes to the storage makes the values unknown.
//
// All values together occupy at most kMaxKnownBytesOfAll: beyond that, new values are unknown, except for storages of
// kFewBytes. Zeros, ones and ranges of integers occupy no memory until they are read.
//
// While deferred_init records, it keeps the values itself, so no values become known here.

#include <array>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "../../libraries/support/stack_utils.h"
#include "known_bytes.h"

namespace torchext {

// Records that a call has written `value` to `fake`: a part of its storage, or all of it. The rest of the storage does
// not change. A part of a storage without values becomes known only if it contains integers.
TORCHEXT_API void writeValue(const at::Tensor& fake, const at::Tensor& value);

// Returns a real CPU tensor that shares the memory of the values of `fake`, or an undefined one if they are unknown.
TORCHEXT_API at::Tensor knownValueOf(const at::Tensor& fake);

// Returns true if known values may be kept for the results and writes of `op`. While deferred_init records, its
// recording holds the values.
bool canRunOnValues(const c10::OperatorHandle& op);

// Returns true if all values in `arguments` that `op` reads are known. It does not read an `out` or overwritten
// arguments.
bool areValuesKnown(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns the arguments that the call writes to, declared or not.
torch::jit::Stack writtenBy(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true if the call writes all of `tensor`, its argument at `position`, without reading it, so that its values
// may become known.
bool overwritesUnknown(const c10::OperatorHandle& op, std::size_t position, const at::Tensor& tensor);

// Returns the start, end and step of a call of `arange` that makes a tensor, or nothing.
std::optional<std::array<at::Scalar, 3>> rangeOf(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Runs `op` on the CPU with `value_of` in place of each tensor in `arguments`, and returns its results. A factory
// receives stand-ins that only have metadata.
torch::jit::Stack runOn(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, TensorMapper value_of);

// The same for a call whose results may be large. Raises DataDependentError if they are too large to compute.
torch::jit::Stack runLimited(const c10::OperatorHandle& op,
                             c10::ArrayRef<c10::IValue> arguments,
                             TensorMapper value_of);

// The same on the known values of `arguments`. Writes to a copy of an `out` instead of the `out` itself.
torch::jit::Stack runOnValues(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns a fake on `device` with the geometry of `value`.
at::Tensor fakeOn(c10::Device device, const at::Tensor& value);

// Returns true for a fake made by the call: it shares its storage with none of `arguments`.
bool isMadeByCall(const at::Tensor& result, c10::ArrayRef<c10::IValue> arguments);

// Gives those of `results` that a call of `arguments` has made the values in `values`.
void giveValues(c10::ArrayRef<c10::IValue> results,
                c10::ArrayRef<c10::IValue> values,
                c10::ArrayRef<c10::IValue> arguments,
                ValueKind kind);

}  // namespace torchext
