#pragma once

// NOTE [Constants keep their values]
//
// `torch.tensor([3, 1, 2])` is fake inside fake_mode(), but its values are known, and programs rely on them: optimizers
// read their step counters with `item()`, others cut a batch to its longest sequence, or look for the tokens that stand
// for images. So a fake storage of at most kMaxKnownBytes may have known values, in real memory on the CPU, whatever
// device the fake claims:
//
//   * `torch.tensor()`, factories (except `empty` and random ones) and fills (`zero_`) give it some;
//   * `fake_like()` and the copies of real tensors and of fakes take over theirs;
//   * an operator whose tensor arguments are all known is also run on the values: what it writes and makes is known,
//     too, and it may read values (`item`, `equal`, `nonzero`);
//   * what is written to a part of a storage of integers, or of one that has values, is known, also where the rest is
//     not;
//   * any other operator that writes to the storage makes the values unknown.
//
// All together take at most kMaxKnownBytesOfAll: what is made while they do is unknown, unless it takes kFewBytes.
// Zeros and ones take none until they are read.
//
// While deferred_init records, it keeps the values itself: none become known here.

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

#include "../../support/stack_utils.h"
#include "known_bytes.h"

namespace torchext {

// Makes `value` the value of `fake`, after a call has written it to `fake`: a part of its storage, or all of it. The
// rest of the storage does not change. A part of a storage without values is known only if these are integers.
TORCHEXT_API void writeValue(const at::Tensor& fake, const at::Tensor& value);

// Gives the storage of `fake` the bytes of `source`, of which `fake` is a copy, if these are known: `source` is real
// and on the CPU or of one element, or a fake with known or assumed values. Does nothing if `fake` has values.
TORCHEXT_API void copyValue(const at::Tensor& fake, const at::Tensor& source);

// Returns a real tensor on the CPU with the values of `fake`, whose memory is theirs, or an undefined one if they are
// not known.
TORCHEXT_API at::Tensor knownValueOf(const at::Tensor& fake);

// Returns true if known values may be kept for what `op` makes and writes. While deferred_init records, the recording
// has them.
bool canRunOnValues(const c10::OperatorHandle& op);

// Returns true if all values in `arguments` that `op` looks at are known. It does not look at an `out`, nor at what it
// overwrites.
bool areValuesKnown(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns the arguments that the call writes to, declared or not.
torch::jit::Stack writtenBy(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns true if the call writes all of `tensor`, its argument at `position`, and reads nothing of it, so that its
// values may be known afterwards.
bool overwritesUnknown(const c10::OperatorHandle& op, std::size_t position, const at::Tensor& tensor);

// The same, if these are all of its storage.
bool overwritesStorage(const c10::OperatorHandle& op, std::size_t position, const at::Tensor& tensor);

// Returns true or false for an operator that makes or writes nothing but ones or zeros.
std::optional<bool> fillOf(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Runs `op` on the CPU with `value_of` in place of each tensor in `arguments`, and returns its results. A factory gets
// stand-ins, of which only the metadata matter.
torch::jit::Stack runOn(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, TensorMapper value_of);

// The same for a call whose results may be large. Raises DataDependentError if they are too large to compute.
torch::jit::Stack runLimited(const c10::OperatorHandle& op,
                             c10::ArrayRef<c10::IValue> arguments,
                             TensorMapper value_of);

// The same on the values of `arguments`, which are known. Instead of an `out`, it writes to another tensor like it.
torch::jit::Stack runOnValues(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns a fake on `device` with the geometry of `value`.
at::Tensor fakeOn(c10::Device device, const at::Tensor& value);

// Returns how many elements of `value`, which is real, are not zero.
std::int64_t countNonzero(const at::Tensor& value);

// Returns true for a fake that shares its storage with none of `arguments`, of which a call has made it.
bool isMadeByCall(const at::Tensor& result, c10::ArrayRef<c10::IValue> arguments);

// Gives those of `results` that a call of `arguments` has made the values in `values`.
void giveValues(c10::ArrayRef<c10::IValue> results,
                c10::ArrayRef<c10::IValue> values,
                c10::ArrayRef<c10::IValue> arguments,
                ValueKind kind);

}  // namespace torchext
