#include "interrupts.h"

#include <atomic>

namespace torchext {

namespace {

std::atomic<InterruptProbe> current_probe{nullptr};

}  // namespace

void setInterruptProbe(InterruptProbe probe) {
  current_probe = probe;
}

bool isInterrupt(const std::exception& error) {
  const InterruptProbe probe = current_probe;
  return probe != nullptr && probe(error);
}

}  // namespace torchext
