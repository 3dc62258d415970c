#pragma once

// NOTE [Constants keep their values]
//
// `torch.tensor(3.0)` is fake inside fake_mode(), but its value is known, and programs rely on it: optimizers read
// their step counters with `item()`. So a fake storage of at most kMaxKnownBytes may have a known value, in real memory
// on the CPU, whatever device the fake claims:
//
//   * `torch.tensor()` and factories (except `empty` and random ones) give it one if they make one element;
//   * `fake_like()` and the copies of fakes take over that of a storage of one element;
//   * an operator whose tensor arguments are all known is also run on the values: what it writes and makes is known,
//     too, and it may read values (`item`, `equal`, `nonzero`);
//   * any other operator that writes to the storage makes the value unknown.
//
// While deferred_init records, it keeps the values itself: none become known here.

#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torchext/macros.h>

namespace torchext {

constexpr std::size_t kMaxKnownBytes = 16;  // one element of the widest dtype

// Returns true if the storage of `fake` is so small that its value may be known. Cheap.
bool mayBeKnown(const at::Tensor& fake) noexcept;

// Returns true if each tensor in `results` has one element.
bool haveOneElement(c10::ArrayRef<c10::IValue> results);

// Makes `value` the known value of `fake`, which is alone on its storage. Does nothing if it is too large.
void rememberValue(const at::Tensor& fake, const at::Tensor& value);

// Gives the storage of `fake` the bytes of `source`, of which `fake` is a copy, if both storages consist of one element
// and the bytes are known: `source` is real, or a fake with a known or assumed value.
TORCHEXT_API void copyValue(const at::Tensor& fake, const at::Tensor& source);

// Returns a real tensor on the CPU with the value of `fake`, or an undefined one if it is not known.
TORCHEXT_API at::Tensor knownValueOf(const at::Tensor& fake);

// If `op` indexes unknown values with masks whose values are known, replaces these masks in `arguments` by the integers
// that they stand for, as `expandTensors()` does (IndexingUtils.h).
void expandKnownMasks(const c10::OperatorHandle& op, torch::jit::Stack& arguments);

// Returns true if all values in `arguments` that `op` looks at are known. It does not look at an `out`.
bool areValuesKnown(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Runs `op` on the values of `arguments`, which are known, and returns its results, which are on the CPU. Instead of an
// `out`, it writes to another tensor like it.
torch::jit::Stack runOnValues(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Returns the assumed value of `fake` as a number, if it has one.
std::optional<double> assumedValue(const at::Tensor& fake);

// Forgets the known values of the fakes in `tensors`, to which something else has written.
void forgetValues(const c10::IValue& tensors);

// To be called after a fake call of `op` has made `results`: runs `op` on the values, too, if they are known, and
// otherwise forgets the values of what it has written.
void followValues(const c10::OperatorHandle& op,
                  c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
