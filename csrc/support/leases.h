#pragma once

// NOTE [Leases on PyTorch's functions]
//
// Some functions of PyTorch that Python calls are replaced (torchext/tools/patching.py says which, and why) while that
// is needed: a block is open, or a tensor of ours is alive. Each of these holds a lease, and the core counts the
// holders. When the last one is gone, which may be a storage that is freed on any thread, the listener is told. It is
// set by the code that replaces the functions, which then puts PyTorch's own back.

#include <atomic>
#include <cstdint>
#include <utility>

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

  // Once for each `hold()`, on any thread, with any locks held. Tells the listener when no holder is left.
  void release() noexcept;

  bool isHeld() const noexcept {
    return holders_.load(std::memory_order_acquire) > 0;
  }

  // Returns true if the functions are replaced now, according to the code that replaces them.
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
  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;
  LeaseHold(LeaseHold&& other) noexcept : lease_{std::exchange(other.lease_, nullptr)} {}
  LeaseHold& operator=(LeaseHold&& other) noexcept {
    std::swap(lease_, other.lease_);
    return *this;
  }
  ~LeaseHold() {
    if (lease_ != nullptr) {
      lease_->release();
    }
  }

 private:
  Lease* lease_;
};

// Held by the blocks in which tensors are fake or deferred, and by every fake storage.
TORCHEXT_API Lease& leaseOfFakes() noexcept;

// Held by the marks of tensors, and by threads on which a block demands the key of marked tensors.
TORCHEXT_API Lease& leaseOfMarks() noexcept;

// Held by regions of autocast, and by all that holds the lease of marks.
TORCHEXT_API Lease& leaseOfRegions() noexcept;

// Called when `lease` has lost its last holder. Must not raise or wait. Null until it is set.
using LeaseListener = void (*)(Lease& lease);
TORCHEXT_API void setLeaseListener(LeaseListener listener);

}  // namespace torchext
