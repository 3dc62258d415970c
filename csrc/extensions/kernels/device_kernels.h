#pragma once

namespace torchext {

// Answers the hook `DeviceKernels`. Call while the library is loaded.
void registerDeviceKernels();

}  // namespace torchext
