#pragma once

// Assumes values for what calls return and write: NOTE [Assumed values].

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace torchext {

// Returns true if values may be assumed for the results or written arguments of a call: they are integers, truth values
// or single numbers. Cheap.
bool mayBeAssumed(c10::ArrayRef<c10::IValue> results);

// Call after a fake call of `op` has made `results` and written to `written`, if not all values of the arguments are
// known. Assumes values for both and returns true, if possible.
bool assumeResults(const c10::OperatorHandle& op,
                   c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results,
                   c10::ArrayRef<c10::IValue> written);

}  // namespace torchext
