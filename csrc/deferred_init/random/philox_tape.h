#pragma once

#include "tape.h"

namespace torchext {

// The tape of Philox, the generator of CUDA: a seed and an offset, which is moved by addition. It works on generators
// of real and of fake devices, through what `c10::GeneratorImpl` declares: NOTE [How far CUDA generators move].
//
// A large tensor has other values on a device with more or fewer threads. A recording is replayed on the device that it
// was made for, but processes may have different ones, so the identity of a position has the numbers of its device
// where they matter.
const Tape& philoxTape();

}  // namespace torchext
