#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torchext/fake_cuda.h>
#include <torchext/macros.h>

#include "gpu.h"

namespace torchext {

// NOTE [CUDA without CUDA]
//
// On a machine without CUDA devices, fake tensors may claim one. Few parts of PyTorch ask whether the device exists.
// This is how they are answered:
//
//   * a device guard that does nothing is registered for CUDA, for the rest of the process: fakes outlive the block
//     that made them, and any thread may hold a pointer to the guard;
//   * kernels of `empty` that make fakes are registered in the same way, for operators that allocate while they run;
//   * the number of devices is a property of the thread, and 0 outside of a block, so that no other thread sees any;
//   * the autograd engine asks which accelerator has been built in, and which devices have a context. A build without
//     CUDA, or one that finds no driver, would raise an error; so while devices are visible on the thread, these
//     functions of the CUDA hooks are replaced;
//   * the engine counts devices once, at the first backward of the process, to start a thread for each. Fakes need
//     none: their backward runs on the thread that calls it;
//   * generators of random numbers for CUDA are asked of the hooks, too: generators.h. Streams are numbers: streams.h;
//   * the functions of torch.cuda are written in Python, and answered in torchext/fake/cuda.py.
//
// On a machine with CUDA devices none of this happens.

// Returns the number of fake CUDA devices that this thread sees.
TORCHEXT_API c10::DeviceIndex fakeCudaDeviceCount() noexcept;

// Returns the largest number that any thread has seen.
TORCHEXT_API c10::DeviceIndex largestFakeCudaDeviceCount() noexcept;

// Returns what the devices are like that this thread sees; outside of blocks, those that were described last in the
// process. Equal descriptions are one object, which lives as long as the process.
TORCHEXT_API const GpuDescription& fakeGpu();

// Describes the devices from now on, for as long as the block lasts that this thread is in.
TORCHEXT_API void describeFakeGpu(GpuDescription gpu);

// Returns a number that changes when a thread begins to see devices while no other does.
std::uint64_t fakeCudaGeneration() noexcept;

// For the time of a backward pass through fakes: this thread sees all devices that any block has had, described as they
// were last, and runs the whole pass.
class TORCHEXT_API FakeCudaBackwardGuard {
 public:
  FakeCudaBackwardGuard();
  C10_DISABLE_COPY_AND_ASSIGN(FakeCudaBackwardGuard);
  ~FakeCudaBackwardGuard();

 private:
  const GpuDescription& gpu_;
  FakeCudaGuard devices_;
  int exceptions_;
  bool multithreading_;
};

// The function that makes the fakes for the kernels of `empty` on the missing devices: it replaces the arguments of a
// factory on top of `stack` by its result. To be set before any device is visible.
using FakeCudaAllocation = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
void setFakeCudaAllocation(FakeCudaAllocation allocation) noexcept;

// Raises "invalid device ordinal" when `device` is a CUDA device that this thread does not see, or, on a machine with
// CUDA devices, that there is not.
void checkFakeCudaDevice(c10::Device device);

}  // namespace torchext
