#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

namespace torchext {

// NOTE [Asking the kernel of the CPU]
//
// A few dozen operators of PyTorch have no Meta kernel (`geqrf`, `histogram`, the backward of some losses). What their
// results look like does not depend on values: those of which it does are tagged so, or known to `needsValues()`, and
// test_zeros_call.py lists the others. So their kernel for the CPU is run once on zeros, whichever device the fakes
// claim, and the answer is remembered like that of a Meta kernel. `FakeTensorMode` does the same
// (`run_fallback_kernel`), and so decides what is allowed here: PyTorch's own operators only. What draws numbers is
// given a generator of its own.
//
// The zeros of the arguments take no memory until something is written there, but results and time are real. Calls on
// arguments of more than kMaxZeroBytes are left alone.
constexpr std::size_t kMaxZeroBytes = std::size_t{1} << 30U;

// True when that is allowed for a call of `op` with the arguments on top of `stack`.
bool mayRunOnZeros(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

// Returns the fake results on `device` of a call of `op` with the arguments on top of `stack`, or nothing when that is
// not allowed or tells nothing.
std::optional<torch::jit::Stack> tryRunOnZeros(const c10::OperatorHandle& op,
                                               const torch::jit::Stack& stack,
                                               c10::Device device);

}  // namespace torchext
