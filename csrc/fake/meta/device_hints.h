#pragma once

// The results of some kernels depend on the device, but Meta kernels do not receive the device that the fake claims.
// There are two remedies: a hint to the Meta kernel, and a correction of its results.

#include <optional>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

// While an instance exists, `deviceOfMetaCall()` returns `device` on this thread. PyTorch's Python Meta kernels call
// `device_hint()` (torch/_meta_registrations.py), and torchext/fake/meta_functions.py makes it return this device.
class MetaCallOnDevice {
 public:
  explicit MetaCallOnDevice(c10::Device device);
  C10_DISABLE_COPY_AND_ASSIGN(MetaCallOnDevice);
  ~MetaCallOnDevice();

 private:
  std::optional<c10::Device> previous_;
};

TORCHEXT_API std::optional<c10::Device> deviceOfMetaCall();

// Returns true if CUDA kernels lay out the results of `op` as CPU kernels do.
bool hasLayoutOfCpu(const c10::OperatorHandle& op);

// Returns true if the results of the Meta kernel of `op` must be corrected for `device`. Some Meta kernels check the
// device of their argument, which is "meta", and so decide as for CUDA (the saved statistics of normalizations). Others
// ignore the device when choosing the memory format of their results (convolutions) or the order of their dimensions
// (elementwise operators: promoted_strides.h).
bool decidesByDevice(const c10::OperatorHandle& op, c10::Device device);

// Corrects the `results` that the Meta kernel of such an operator has returned for `arguments`, which are on `device`.
void correctForDevice(const c10::OperatorHandle& op,
                      c10::ArrayRef<c10::IValue> arguments,
                      c10::Device device,
                      torch::jit::Stack& results);

}  // namespace torchext
