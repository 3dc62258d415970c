#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

namespace torchext {

// NOTE [Asking the kernel of the CPU]
//
// A few dozen operators of PyTorch have no Meta kernel (`geqrf`, `histogram`, the backward of some losses). The
// metadata of their results do not depend on values: operators for which they do are tagged so, or known to
// `needsValues()`, and test_zeros_call.py lists the others. So their CPU kernel is run once on zeros, whichever device
// the fakes claim, and the result is remembered like that of a Meta kernel. `FakeTensorMode` does the same
// (`run_fallback_kernel`), and sets the limit for what is allowed here: PyTorch's own operators only. Random operators
// are given a generator of their own.
//
// The zeros take no memory until something is written there, but the results do, and the kernel takes its time. Calls
// with more than kMaxZeroBytes of arguments are not run.
constexpr std::size_t kMaxZeroBytes = std::size_t{1} << 30U;

// Returns true if that is allowed for a call of `op` with the arguments on top of `stack`.
bool mayRunOnZeros(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the fake results on `device` of a call of `op` with the arguments on top of `stack`, or nothing if that is
// not allowed, or shows nothing.
std::optional<torch::jit::Stack> tryRunOnZeros(const c10::OperatorHandle& op,
                                               const torch::jit::Stack& stack,
                                               c10::Device device);

}  // namespace torchext
