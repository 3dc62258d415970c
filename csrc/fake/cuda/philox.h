#pragma once

// NOTE [How far CUDA generators move]
//
// The generators of CUDA are counters: Philox computes a number from a seed, the thread that asks, and an offset.
// Before a kernel is launched, its host code moves the offset of the generator by as much as any thread may use, which
// depends on the shapes, on the dtype, and on how many threads the device has. So what an operator draws is known
// without running it: where it starts, and where the next one does. The rules are those of PyTorch's host code
// (DistributionTemplates.h and the kernels' own files in ATen/native/cuda); test/fake/test_philox.py compares them with
// that, as run on three GPUs.

#include <cstdint>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

// What random numbers depend on of a device. Both are 0 where it cannot be asked.
struct PhiloxGpu {
  int multiprocessors = 0;
  int threads_per_multiprocessor = 0;

  bool operator==(const PhiloxGpu& other) const noexcept {
    return multiprocessors == other.multiprocessors && threads_per_multiprocessor == other.threads_per_multiprocessor;
  }

  // How many elements a kernel draws for at most with one thread for each. The values of a larger tensor are others on
  // a device with more or fewer threads.
  std::int64_t wave() const noexcept;
};

// That of `device`, a CUDA device, which may be a fake one.
PhiloxGpu philoxGpuOf(c10::Device device);

struct PhiloxDraws {
  // How far the generator is moved.
  std::uint64_t offset = 0;
  // How many elements are drawn for at a time: see `wave()`.
  std::int64_t elements = 0;
};

// That of the first tensor on CUDA among `arguments`, where their kernel runs and draws.
std::optional<c10::Device> cudaDeviceOf(c10::ArrayRef<c10::IValue> arguments);

// What `op` would draw on `gpu` with the arguments on top of `stack`, among which tensors may be fake. Nothing for
// operators that draw by values, or are not known, and for arguments that PyTorch refuses.
std::optional<PhiloxDraws> philoxDrawsOf(const c10::OperatorHandle& op,
                                         const torch::jit::Stack& stack,
                                         const PhiloxGpu& gpu);

}  // namespace torchext
