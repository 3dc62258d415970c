#pragma once

namespace torchext {

// The functions by which these extensions answer the hooks of the core. Called once each, while the library is loaded
// (extensions/registration.cpp), which needs nothing else of their files.
void registerFakeValues();
void registerLayouts();  // after the registration of the other handlers of calls
void registerUnboxedCalls();
void registerComposites();
void registerKernelTrials();
void registerTwisterTape();
void registerPhiloxTape();
void registerReplayFill();
void registerPartRules();
void registerKeptValues();

}  // namespace torchext
