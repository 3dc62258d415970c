#pragma once

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <torchext/fake_cuda.h>
#include <torchext/macros.h>

#include "gpu.h"

namespace torchext {

// NOTE [Fake CUDA]
//
// On a machine without CUDA devices, fake tensors may claim one. Few parts of PyTorch check whether the device exists.
// They are answered as follows:
//
//   * A device guard that does nothing is registered for CUDA, for the rest of the process: fakes outlive the block
//     that made them, and any thread may hold a pointer to the guard.
//   * Kernels of `empty` that make fakes are registered in the same way, for operators that allocate while they run.
//   * The number of devices belongs to the thread and is 0 outside of a block, so other threads have no devices.
//   * The autograd engine queries which accelerator has been built in, and which devices have a context. A build
//     without CUDA, or one that finds no driver, would raise an error. So these functions of the CUDA hooks are
//     replaced while devices are visible on the thread.
//   * The engine counts devices once, at the first backward pass of the process, to start a thread for each. Fakes need
//     no such threads: their backward pass runs on the calling thread.
//   * The hooks also provide CUDA random generators: generators.h. Streams are numbers: streams.h.
//   * The functions of torch.cuda are written in Python and replaced in torchext/fake/cuda.py.
//
// On a machine with CUDA devices none of this happens.

// Returns the number of fake CUDA devices on this thread.
TORCHEXT_API c10::DeviceIndex fakeCudaDeviceCount() noexcept;

// Returns the largest number of fake CUDA devices that any thread has had.
TORCHEXT_API c10::DeviceIndex largestFakeCudaDeviceCount() noexcept;

// Returns the description of this thread's devices; outside of blocks, the last one set by any thread. Equal
// descriptions are the same object, which lives as long as the process.
TORCHEXT_API const GpuDescription& fakeGpu();

// Sets the description of the devices for the rest of this thread's current block.
TORCHEXT_API void describeFakeGpu(GpuDescription gpu);

// Returns a number that changes when a thread gets devices while no other thread has any.
std::uint64_t fakeCudaGeneration() noexcept;

// Returns true if the devices of this generation have been used, as `torch.cuda.is_initialized()`.
TORCHEXT_API bool isFakeCudaInitialized() noexcept;
TORCHEXT_API void setFakeCudaInitialized() noexcept;

// Exists during a backward pass through fakes: gives this thread the largest number of devices of any block, with the
// last description, and makes it run the whole pass.
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

// The function that makes fakes for the kernels of `empty` on the missing devices. It replaces the arguments of a
// factory on top of `stack` by the result. Set it before any device is visible.
using FakeCudaAllocation = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);
void setFakeCudaAllocation(FakeCudaAllocation allocation) noexcept;

// Raises "invalid device ordinal" if `device` is a CUDA device that this thread does not have or, on a machine with
// CUDA devices, that does not exist.
void checkFakeCudaDevice(c10::Device device);

// Answers the hook `FakeDevices`, and adds what calls on CUDA need. Call while the library is loaded.
void registerFakeCuda();

// NOTE [Composed on CUDA]
//
// Some differentiable operators have one kernel for all devices (`CompositeExplicitAutograd`), which calls other
// operators: `aten::_trilinear` multiplies slice by slice. These operators allocate temporary buffers. A rule for the
// whole operator (NOTE [Allocations of kernels]) could only repeat their allocations. So on fake CUDA devices this
// kernel runs on the fakes, and the operators that it calls are faked. Elsewhere, the operator's own Meta kernel
// determines the results directly. The recorder of deferred_init needs the whole operator.

// Returns the key of the kernel that a call of `op` runs on the fakes, if it is such an operator and is called on CUDA.
std::optional<c10::DispatchKey> composedKernelOnCuda(const c10::OperatorHandle& op,
                                                     c10::ArrayRef<c10::IValue> arguments);

// Makes a profile with `ProfilerActivity.CUDA` record no time on fake CUDA devices. Without CUPTI the profiler records
// an event before and after each operator, by functions that raise an error in a build without CUDA.
void standInForCudaProfiler();

}  // namespace torchext
