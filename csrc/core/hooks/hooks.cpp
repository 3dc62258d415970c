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
constexpr Nothing<KeyOwners> no_owners;

}  // namespace

void KeyOwners::share() const {
  TORCH_CHECK(false,
              "Fake and deferred tensors need the dispatch key `Fake`, which already has a fallback, registered by "
              "another library or by this version of PyTorch, and can have only one. Use torchext in a process that "
              "does not load that library.");
}

// Constant-initialized, so that other files can change it while the library is loaded.
Hooks& hooks() noexcept {
  static Hooks hooks{&no_values, &no_checks, &no_trials, &no_kernels, &no_devices, &no_collectives, &no_owners};
  return hooks;
}

}  // namespace torchext
