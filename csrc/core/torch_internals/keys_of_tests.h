#pragma once

#include <c10/core/DispatchKeySet.h>

namespace torchext {

// PyTorch's two keys for its own tests of modes and wrappers (backend_fallback_test.cpp). Nothing else uses them. They
// are above all keys with kernels in ordinary use, and the one for modes is above the one for wrappers.
constexpr c10::DispatchKey kKeyOfModesInTests = c10::DispatchKey::TESTING_ONLY_GenericMode;
constexpr c10::DispatchKey kKeyOfWrappersInTests = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

// Returns true if the keys have this order.
inline bool testKeysOfTests(bool is_broken) {
  const c10::DispatchKeySet below_modes{c10::DispatchKeySet::FULL_AFTER, kKeyOfModesInTests};
  const c10::DispatchKeySet below_wrappers{c10::DispatchKeySet::FULL_AFTER, kKeyOfWrappersInTests};
  const c10::DispatchKeySet met_later({c10::DispatchKey::DeferredInit, c10::DispatchKey::AutocastCPU,
                                       c10::DispatchKey::AutogradFunctionality, c10::DispatchKey::ADInplaceOrView,
                                       c10::DispatchKey::Fake});
  return below_modes.has(kKeyOfWrappersInTests) != is_broken && below_wrappers.has_all(met_later);
}

}  // namespace torchext
