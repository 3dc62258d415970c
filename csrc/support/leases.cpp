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
// be used then.
Lease& leaseOfFakes() noexcept {
  static constinit Lease lease;
  return lease;
}

Lease& leaseOfMarks() noexcept {
  static constinit Lease lease;
  return lease;
}

Lease& leaseOfRegions() noexcept {
  static constinit Lease lease;
  return lease;
}

void setLeaseListener(LeaseListener listener) {
  current_listener = listener;
}

}  // namespace torchext
