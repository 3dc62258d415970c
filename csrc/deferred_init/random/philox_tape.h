#pragma once

#include "tape.h"

namespace torchext {

// The tape of Philox, the generator of CUDA: a seed and an offset, which is moved by addition. It works on generators
// of real and of fake devices, through what `c10::GeneratorImpl` declares: NOTE [How far CUDA generators move].
//
// A large tensor has other values on a device with more or fewer threads. So a position has the numbers of the device
// for which it was recorded, and drawing on another one raises an error, unless the environment variable
// TORCHEXT_ACCEPT_OTHER_GPU=1 accepts that.
const Tape& philoxTape();

}  // namespace torchext
