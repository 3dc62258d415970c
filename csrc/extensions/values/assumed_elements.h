#pragma once

// Tensors that are too large for values: a few elements that repeat stand for all of them.

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

namespace torchext {

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
