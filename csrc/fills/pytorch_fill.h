#pragma once

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

#include "random_fill.h"

namespace torchext {

// Fills memory by PyTorch's own kernel for the CPU, and moves the engine. Nothing that is active on the thread sees the
// call, be it a mode, a handler of ours, autograd, autocast or a profiler, and no generator of the user's is touched.
void fillByPyTorch(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine);

}  // namespace torchext
