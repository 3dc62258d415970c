#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>

#include "../../support/macros.h"

namespace torchext {

// NOTE [CUDA without CUDA]
//
// On a machine without CUDA devices fake tensors may claim one. Little of PyTorch asks whether there is something
// behind that name, and this is how it is answered:
//
//   * a device guard that does nothing is registered for CUDA, for the rest of the process: fakes outlive the block
//   that
//     made them, and any thread may hold a pointer to the guard;
//   * so are kernels of `empty` that make fakes, for operators that allocate while they run;
//   * how many devices there are is a property of the thread, and 0 outside of a block, so that nobody else sees any;
//   * the autograd engine asks which accelerator has been built in, and which devices have a context. A build without
//     CUDA, or one that finds no driver, answers with an error; so these functions of the CUDA hooks are answered here
//     while devices are visible on the thread;
//   * the engine counts devices once, at the first backward of the process, to start a thread for each. Fakes need
//   none:
//     their backward runs on the thread that asks for it;
//   * the functions of torch.cuda are Python, see torchext/fake/cuda.py.
//
// On a machine with CUDA devices nothing of this happens.

// True on a machine that has CUDA devices. Asked once.
TORCHEXT_API bool hasRealCuda();

// The number of fake CUDA devices that this thread sees.
TORCHEXT_API c10::DeviceIndex fakeCudaDeviceCount() noexcept;

// The largest number that any thread has seen.
TORCHEXT_API c10::DeviceIndex largestFakeCudaDeviceCount() noexcept;

// While it lives, this thread sees `count` fake CUDA devices. Nests; the innermost counts.
class TORCHEXT_API FakeCudaGuard {
 public:
  explicit FakeCudaGuard(c10::DeviceIndex count);
  FakeCudaGuard(const FakeCudaGuard&) = delete;
  FakeCudaGuard& operator=(const FakeCudaGuard&) = delete;
  FakeCudaGuard(FakeCudaGuard&&) = delete;
  FakeCudaGuard& operator=(FakeCudaGuard&&) = delete;
  ~FakeCudaGuard();

 private:
  c10::DeviceIndex previous_count_;
  c10::DeviceIndex previous_device_;
};

// For the time of a backward pass through fakes: this thread sees all devices that any block has had, and runs the
// whole pass.
class TORCHEXT_API FakeCudaBackwardGuard {
 public:
  FakeCudaBackwardGuard();
  FakeCudaBackwardGuard(const FakeCudaBackwardGuard&) = delete;
  FakeCudaBackwardGuard& operator=(const FakeCudaBackwardGuard&) = delete;
  FakeCudaBackwardGuard(FakeCudaBackwardGuard&&) = delete;
  FakeCudaBackwardGuard& operator=(FakeCudaBackwardGuard&&) = delete;
  ~FakeCudaBackwardGuard();

 private:
  FakeCudaGuard devices_;
  bool multithreading_;
};

// Makes the fakes that kernels of `empty` for the missing devices return: replaces the arguments of a factory on top of
// `stack` by its result. To be set before any device is visible.
using FakeCudaAllocation = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
void setFakeCudaAllocation(FakeCudaAllocation allocation) noexcept;

// Raises "invalid device ordinal" when `device` is a fake CUDA device that this thread does not see.
void checkFakeCudaDevice(c10::Device device);

}  // namespace torchext
