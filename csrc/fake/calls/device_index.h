#pragma once

#include <c10/core/Device.h>

namespace torchext {

// Returns the device on which a factory makes tensors when it is asked for `device`: "cuda" is the current CUDA device,
// and "cpu:0" is "cpu".
c10::Device withIndex(c10::Device device);

}  // namespace torchext
