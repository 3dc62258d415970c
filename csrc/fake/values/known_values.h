#pragma once

// NOTE [Constants keep their values]
//
// `torch.tensor(3.0)` is fake inside fake_mode(), but its value is known, and programs count on it: optimizers read
// their step counters with `item()`. So a fake storage of at most kMaxKnownBytes may have a known value, in real memory
// on the CPU whatever device the fake claims:
//
//   * `torch.tensor()` and factories (but `empty` and random ones) of one element give it one;
//   * an operator whose tensor arguments are all known is also run on the values: what it writes and what it makes is
//     known again, and what it reads (`item`, `equal`, `nonzero`) it may read;
//   * any other operator that writes into the storage takes the value away.
//
// While deferred_init records, values are its business: none are known then.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

constexpr std::size_t kMaxKnownBytes = 16;  // one element of the widest dtype

// True when the storage of `fake` is so small that its value may be known. Cheap.
bool mayBeKnown(const at::Tensor& fake) noexcept;

// True when each tensor in `results` has one element.
bool haveOneElement(c10::ArrayRef<c10::IValue> results);

// Makes the value of `fake`, which is alone on its storage, known. Does nothing when it is too large.
void rememberValue(const at::Tensor& fake, const at::Tensor& value);

// Tells whether the values of all tensors in `arguments` are known, as far as `op` looks at them.
bool areValuesKnown(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Runs `op` on the values of `arguments`, which are known, and returns what it returns, on the CPU.
torch::jit::Stack runOnValues(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

// Takes the values away that are known of the fakes in `tensors`, which has been written by somebody else.
void forgetValues(const c10::IValue& tensors);

// To be called after `op` has been run as a fake call that made `results`: runs it on values too if they are known, and
// otherwise forgets the values of what it has written.
void followValues(const c10::OperatorHandle& op,
                  c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
