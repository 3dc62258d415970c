#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#include <torchext/macros.h>

namespace torchext {

// The random generators of fake CUDA devices have the state of real ones (a seed and an offset), and draw nothing.

// Returns a new generator of `device`.
at::Generator newFakeCudaGenerator(c10::DeviceIndex device);

// Returns the generator of `device` that is drawn from by default.
TORCHEXT_API const at::Generator& defaultFakeCudaGenerator(c10::DeviceIndex device);

}  // namespace torchext
