#pragma once

// NOTE [Moves of CUDA generators]
//
// CUDA generators are counters: Philox computes a number from a seed, the index of the thread and an offset. Before
// launching a kernel, its host code advances the generator's offset by the most that any thread may use. This depends
// on the shapes, the dtype and the number of threads of the device. So the random numbers of an operator are known
// without running it: where they start and where those of the next operator start. The rules follow the host code in
// ATen/native/cuda (DistributionTemplates.h and the kernels' own files). test/fake/test_philox.py compares them with
// results of that code on three GPUs.

#include <cstdint>
#include <memory>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

#include "../../core/hooks/hooks.h"

namespace torchext {

// The properties of a device that random numbers depend on. Both are 0 if the device cannot be queried.
struct PhiloxGpu {
  int multiprocessors = 0;
  int threads_per_multiprocessor = 0;

  // Returns the maximum number of elements for which a kernel draws with one thread each. The values of larger tensors
  // differ on a device with more or fewer threads.
  std::int64_t wave() const noexcept;
};

// Returns the properties of `device`, a real or fake CUDA device.
PhiloxGpu philoxGpuOf(c10::Device device);

struct PhiloxDraws {
  // The increment of the generator's offset.
  std::uint64_t offset = 0;
  // The number of elements drawn at a time: see `wave()`.
  std::int64_t elements = 0;
};

// Returns the device of the first CUDA tensor among `arguments`, which is where their kernel runs and draws.
std::optional<c10::Device> cudaDeviceOf(c10::ArrayRef<c10::IValue> arguments);

// Returns the draws of `op` on `gpu` with the arguments on top of `stack`, which may be fake. Returns nothing for
// operators that draw depending on values or have no rule, and for arguments that PyTorch refuses.
std::optional<PhiloxDraws> philoxDrawsOf(const c10::OperatorHandle& op,
                                         const torch::jit::Stack& stack,
                                         const PhiloxGpu& gpu);

// The random generators of fake CUDA devices have the state of real ones (a seed and an offset). They draw nothing, but
// advance as real ones do: NOTE [Moves of CUDA generators].

// Returns a new generator of `device`.
at::Generator newFakeCudaGenerator(c10::DeviceIndex device);

// Returns the default generator of `device`.
TORCHEXT_API const at::Generator& defaultFakeCudaGenerator(c10::DeviceIndex device);

// The follower of calls that advance the generator of a fake CUDA device. Null for operators that draw from no such
// generator on this thread, or that have no rule.
std::unique_ptr<CallFollower> followFakeCudaDraws(const c10::OperatorHandle& op,
                                                  const torch::jit::Stack& stack,
                                                  c10::function_ref<bool()> decomposes);

}  // namespace torchext
