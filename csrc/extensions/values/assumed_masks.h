#pragma once

// NOTE [Assumed masks]
//
// The policy for masks is a vector of truth values, repeated over the elements of a mask: which elements count. An
// element that counts is ordinary: it differs from the number that it is compared with (`ids != padding`, `labels ==
// -100`), an integer is kOrdinaryInteger, and a floating-point number passes any threshold, in either direction. So if
// all elements count, a program selects as many as possible. For an element that does not count, the truth value is the
// opposite. If the result is the same for numbers of all sizes (`isnan()`, `x == x`), or follows from values, the
// policy is not used.

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace torchext {

// Assumes which elements of a tensor without values pass the test `op`. Returns false for other calls.
bool assumeMask(const c10::OperatorHandle& op,
                c10::ArrayRef<c10::IValue> arguments,
                c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
