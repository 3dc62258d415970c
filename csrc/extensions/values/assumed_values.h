#pragma once

// Assumes values for what calls return and write: NOTE [Assumed values].

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "assumptions.h"

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

// NOTE [Assumed indices]
//
// Sorting, selecting and sampling return positions in a dimension of n elements. The policy for routing chooses them:
// torchext/fake/routing.py. A row of at most n positions has no duplicates. Values that depend on positions, such as
// the tokens of each expert, are computed exactly even if they are large, up to kMaxRoutedBytes. Beyond that the
// positions are a pattern that repeats.

// Assumes the positions that `op` returns. Returns false for other calls.
bool assumeIndices(const c10::OperatorHandle& op,
                   c10::ArrayRef<c10::IValue> arguments,
                   c10::ArrayRef<c10::IValue> results,
                   const Assumptions& assumptions);

// NOTE [Assumed masks]
//
// The policy for masks is a vector of truth values, repeated over the elements of a mask: which elements count. An
// element that counts is ordinary: it differs from the number that it is compared with (`ids != padding`, `labels ==
// -100`), an integer is kOrdinaryInteger, and a floating-point number passes any threshold, in either direction. So if
// all elements count, a program selects as many as possible. For an element that does not count, the truth value is the
// opposite. If the result is the same for numbers of all sizes (`isnan()`, `x == x`), or follows from values, the
// policy is not used.

// Assumes which elements of a tensor without values pass the test `op`. Returns false for other calls.
bool assumeMask(const c10::OperatorHandle& op,
                c10::ArrayRef<c10::IValue> arguments,
                c10::ArrayRef<c10::IValue> results);

// Tensors that are too large for values: a few elements that repeat stand for all of them.

// An element of a large integer tensor (such as a token) in comparisons: neither padding nor the end.
constexpr int64_t kOrdinaryInteger = 11;

// Returns true for a tensor with several numbers and without values.
bool isOpen(const at::Tensor& tensor);

// Returns as many ones as `tensor` has dimensions.
std::vector<std::int64_t> sizesOfOne(const at::Tensor& tensor);

// Returns a few elements that represent all of `tensor`, or an undefined tensor if that is impossible.
at::Tensor elementFor(const at::Tensor& tensor);

// Returns how often `op` counts numbers in the large `counted`, whose elements repeat, or an undefined tensor.
at::Tensor countsOf(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const at::Tensor& counted);

// Computes truth values of tensors that are too large for values, and results for elements that repeat. Returns false
// for other calls.
bool assumeElements(const c10::OperatorHandle& op,
                    c10::ArrayRef<c10::IValue> arguments,
                    c10::ArrayRef<c10::IValue> results);

// The same for sums of large masks and of other tensors whose elements repeat.
bool assumeCounts(const c10::OperatorHandle& op,
                  c10::ArrayRef<c10::IValue> arguments,
                  c10::ArrayRef<c10::IValue> results);

}  // namespace torchext
