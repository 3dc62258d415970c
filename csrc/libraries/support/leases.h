#pragma once

// NOTE [Leases on PyTorch's functions]
//
// Some functions of PyTorch that Python calls are replaced while a block is open or one of our tensors is alive.
// torchext/internals/patching.py lists them with the reasons. Each such block or tensor holds a lease, and the core
// counts the holders. When the last holder is gone (a storage may be freed on any thread), the listener is called. The
// code that replaces the functions sets the listener, and then restores PyTorch's own.

#include <atomic>
#include <cstdint>
#include <memory>

#include <c10/macros/Macros.h>
#include <torchext/macros.h>

namespace torchext {

class TORCHEXT_API Lease {
 public:
  constexpr Lease() = default;
  C10_DISABLE_COPY_AND_ASSIGN(Lease);
  ~Lease() = default;

  void hold() noexcept {
    holders_.fetch_add(1, std::memory_order_acq_rel);
  }

  // Call it once for each `hold()`, on any thread, with any locks held. Calls the listener when no holder is left.
  void release() noexcept;

  std::int64_t holders() const noexcept {
    return holders_.load(std::memory_order_acquire);
  }
  bool isHeld() const noexcept {
    return holders() > 0;
  }

  // Returns true if the functions are replaced now, as set by the code that replaces them.
  bool isActive() const noexcept {
    return is_active_.load(std::memory_order_acquire);
  }
  void setActive(bool is_active) noexcept {
    is_active_.store(is_active, std::memory_order_release);
  }

 private:
  std::atomic<std::int64_t> holders_{0};
  std::atomic<bool> is_active_{false};
};

// Holds a lease as long as it lives.
class LeaseHold {
 public:
  explicit LeaseHold(Lease& lease) noexcept : lease_{&lease} {
    lease.hold();
  }

 private:
  struct Release {
    void operator()(Lease* lease) const noexcept {
      lease->release();
    }
  };

  std::unique_ptr<Lease, Release> lease_;
};

// Held by the blocks in which tensors are fake or deferred, and by every fake storage.
TORCHEXT_API Lease& leaseOfFakes() noexcept;

// Held by the marks of tensors, and by threads on which a block demands the key of marked tensors.
TORCHEXT_API Lease& leaseOfMarks() noexcept;

// Held by autocast regions, and by all holders of the lease of marks.
TORCHEXT_API Lease& leaseOfRegions() noexcept;

// Called when `lease` has lost its last holder. Must not raise or block. Null until it is set.
using LeaseListener = void (*)(Lease& lease);
TORCHEXT_API void setLeaseListener(LeaseListener listener);

}  // namespace torchext
