#pragma once

/// @file
/// CUDA devices that are not there, for fake tensors to be on.

#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

struct GpuDescription;

/// Returns true if the machine has CUDA devices. Asks PyTorch once.
TORCHEXT_API bool hasRealCuda();

/// While it lives, this thread sees `count` fake CUDA devices. Guards nest, and the innermost counts.
class TORCHEXT_API FakeCudaGuard {
 public:
  /// @param count The number of devices, 1 or more.
  /// @throws c10::Error The machine has CUDA devices (use those), or `count` is out of range.
  explicit FakeCudaGuard(c10::DeviceIndex count);
  C10_DISABLE_COPY_AND_ASSIGN(FakeCudaGuard);
  ~FakeCudaGuard();

 private:
  c10::DeviceIndex previous_count_;
  c10::DeviceIndex previous_device_;
  const GpuDescription* previous_gpu_;
};

}  // namespace torchext
