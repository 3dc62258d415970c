#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

#include "random_fill.h"

namespace torchext {

// Fills memory by PyTorch's CPU kernel, and advances the engine. Modes, torchext handlers, autograd, autocast and
// profilers of the thread do not observe the call, and user generators stay unchanged.
void fillByPyTorch(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

}  // namespace torchext
