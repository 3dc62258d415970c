#pragma once

// Calls whose result depends on values: numbers, shapes and counts that the program reads.

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torchext {

// Returns the lengths of sequences that `op` uses for the fake `lengths`: their values if they have any, otherwise the
// share of `most` that counts in masks.
at::Tensor assumedLengths(const c10::OperatorHandle& op, const at::Tensor& lengths, std::int64_t most);

// The same for sequences of equal lengths with `total` elements together. The last one gets the remainder.
at::Tensor assumedShares(const c10::OperatorHandle& op, const at::Tensor& lengths, std::int64_t total);

// Returns the results, with assumed values, of a call of `op` that reads values. Returns nothing if it reads no values,
// or if values are not assumed.
std::optional<torch::jit::Stack> assumeValues(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

enum class Noting : std::uint8_t { kNotes, kIsSilent };

// Returns how many elements of `mask` are assumed to count, or nothing if values are not assumed.
std::optional<std::int64_t> assumedCount(const c10::OperatorHandle& op, const at::Tensor& mask, Noting noting);

// Returns whether the compared tensors are assumed to be equal, or close. Returns nothing if values are not assumed.
std::optional<bool> assumeEqual(const c10::OperatorHandle& op, const at::Tensor& a, const at::Tensor& b);

}  // namespace torchext
