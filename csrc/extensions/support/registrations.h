#pragma once

namespace torchext {

// The functions by which extensions answer hooks of these names, and handle calls. Called once each, while the library
// is loaded (extensions/registration.cpp).
void registerFakeValues();
void registerKernelTrials();
void registerDeviceKernels();
void registerPartRules();
void registerComputedValues();
void registerExternalValues();

}  // namespace torchext
