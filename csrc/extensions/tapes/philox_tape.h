#pragma once

#include "../../core/deferred_init/random/tape.h"

namespace torchext {

// The tape of Philox, the generator of CUDA: a seed and an offset, which moves by addition. It works on generators of
// real and fake devices, through the interface of `c10::GeneratorImpl`: NOTE [Moves of CUDA generators].
//
// A large tensor gets other values on a device with more or fewer threads. A recording is replayed on the device that
// it was made for, but processes may have different devices. So the identity of a position includes the thread counts
// of its device where they matter.
const Tape& philoxTape();

}  // namespace torchext
