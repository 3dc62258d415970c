#pragma once

#include "tape.h"

namespace torchext {

// Positions of generators of which nothing is known: copies of their state. Operators are run to move them.
TORCHEXT_API const Tape& copiedTape();

}  // namespace torchext
