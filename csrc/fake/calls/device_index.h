#pragma once

#include <c10/core/Device.h>

namespace torchext {

// The device that a factory makes tensors on when it is asked for `device`: "cuda" is the current CUDA device, and
// "cpu:0" is "cpu".
c10::Device withIndex(c10::Device device);

}  // namespace torchext
