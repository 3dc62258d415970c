#pragma once

#include <cstddef>
#include <memory>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

#include "../../core/fake/cache/result_recipe.h"

namespace torchext {

// NOTE [Running the CPU kernel]
//
// A few dozen PyTorch operators have no Meta kernel (`geqrf`, `histogram`, the backward operators of some losses). The
// metadata of their results do not depend on values: operators with value-dependent results have a tag or are handled
// by `needsValues()`, and test_zeros_call.py lists the others. So their CPU kernel is run once on zeros, regardless of
// the claimed device, and the result is cached like that of a Meta kernel. `FakeTensorMode` does the same
// (`run_fallback_kernel`). As there, only PyTorch's own operators are run. Random operators get a private generator.
//
// The zeros occupy no memory until they are written, but the results do, and kernels can be slow. Calls with more than
// kMaxZeroBytes of arguments are not run.
constexpr std::size_t kMaxZeroBytes = std::size_t{1} << 30U;

// Returns true if that is allowed for a call of `op` with the arguments on top of `stack`.
bool mayRunOnZeros(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the recipe of a call of `op` on `device` with the arguments on top of `stack`, or null if the call is not
// allowed or fails on zeros.
std::shared_ptr<ResultRecipe> describeOnZeros(const c10::OperatorHandle& op,
                                              const torch::jit::Stack& stack,
                                              c10::Device device);

}  // namespace torchext
