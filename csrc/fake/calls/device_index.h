#pragma once

#include <c10/core/Device.h>

namespace torchext {

// Returns the device on which a factory with the argument `device` makes tensors: "cuda" becomes the current CUDA
// device, "cpu:0" becomes "cpu".
c10::Device withIndex(c10::Device device);

}  // namespace torchext
