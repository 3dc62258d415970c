#pragma once

#include "tape.h"

namespace torchext {

// Positions of generators of unknown types: copies of their state. Moving one means running the operators.
TORCHEXT_API const Tape& copiedTape();

}  // namespace torchext
