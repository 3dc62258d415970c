#pragma once

// The core does not know Python, but what it calls may be written in Python, and be asked to stop.

#include <exception>

namespace torchext {

// Tells whether `error` is one that asks the program to stop, such as Python's KeyboardInterrupt, and so must not be
// taken for a failure of what raised it. Set by the bindings; null before.
using InterruptProbe = bool (*)(const std::exception& error);
void setInterruptProbe(InterruptProbe probe);

bool isInterrupt(const std::exception& error);

}  // namespace torchext
