#pragma once

// The results of some kernels depend on the device, but Meta kernels do not receive the device that the fake claims.
// There are two remedies: a hint to the Meta kernel (`MetaCallOnDevice`), and a correction of its results.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>

namespace torchext {

// Returns true if CUDA kernels lay out the results of `op` as CPU kernels do.
bool hasLayoutOfCpu(const c10::OperatorHandle& op);

// Corrects the `results` that the Meta kernel of `op` has returned for `arguments`, which are on `device`, if they
// depend on the device. Some Meta kernels check the device of their argument, which is "meta", and so decide as for
// CUDA (the saved statistics of normalizations). Others ignore the device when choosing the memory format of their
// results (convolutions) or the order of their dimensions (elementwise operators: promoted_strides.h).
void correctForDevice(const c10::OperatorHandle& op,
                      c10::ArrayRef<c10::IValue> arguments,
                      c10::Device device,
                      torch::jit::Stack& results);

}  // namespace torchext
