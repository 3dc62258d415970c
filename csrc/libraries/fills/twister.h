#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext {

// Returns true if PyTorch can leave an engine in this state: after a seed, or after draws. A state that was assembled
// by hand may differ.
bool canDrawFrom(const at::mt19937_data_pod& engine);

// Draws random numbers from an engine, many at once. Leaves the engine in the state after as many calls of
// `at::mt19937::operator()`. Requires `canDrawFrom()`.
void drawNumbers(at::mt19937_data_pod& engine, std::uint32_t* numbers, std::int64_t count);

// Returns true if the states of the engines are equal in all bytes.
bool areSame(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b);

}  // namespace torchext
