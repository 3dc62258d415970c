#include "hooks.h"

namespace torchext {

namespace {

// A hook that no extension answers.
template <typename Hook>
struct Nothing final : Hook {
  constexpr Nothing() = default;
};

constexpr Nothing<FakeValues> no_values;
constexpr Nothing<HitChecks> no_checks;
constexpr Nothing<KernelTrials> no_trials;
constexpr Nothing<DeviceKernels> no_kernels;
constexpr Nothing<FakeDevices> no_devices;
constexpr Nothing<Collectives> no_collectives;

}  // namespace

// Constant-initialized, so that other files can change it while the library is loaded.
Hooks& hooks() noexcept {
  static Hooks hooks{&no_values, &no_checks, &no_trials, &no_kernels, &no_devices, &no_collectives};
  return hooks;
}

}  // namespace torchext
