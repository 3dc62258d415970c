#include "leases.h"

namespace torchext {

namespace {

std::atomic<LeaseListener> current_listener{nullptr};

}  // namespace

void Lease::release() noexcept {
  if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    if (const LeaseListener listener = current_listener) {
      listener(*this);
    }
  }
}

// Storages may be freed after static objects have been destroyed. The lease has a trivial destructor, so it can still
// be used then. Its constructor is constexpr, so it is initialized before any code runs and needs no lock. `constinit`
// would enforce that, but C++17 (PyTorch 2.11) does not have it.
Lease& leaseOfFakes() noexcept {
  static Lease lease;
  return lease;
}

Lease& leaseOfMarks() noexcept {
  static Lease lease;
  return lease;
}

Lease& leaseOfRegions() noexcept {
  static Lease lease;
  return lease;
}

void setLeaseListener(LeaseListener listener) {
  current_listener = listener;
}

}  // namespace torchext
