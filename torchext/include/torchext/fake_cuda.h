#pragma once

/// @file
/// Fake CUDA devices for fake tensors.

#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

struct GpuDescription;

/// Returns true if the machine has CUDA devices. Queries PyTorch once per process.
TORCHEXT_API bool hasRealCuda();

/// Gives this thread `count` fake CUDA devices while it lives. Guards nest, and the innermost takes effect.
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
