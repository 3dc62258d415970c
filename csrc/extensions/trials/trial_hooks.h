#pragma once

namespace torchext {

// Answers the hook `KernelTrials`. Call while the library is loaded.
void registerKernelTrials();

}  // namespace torchext
