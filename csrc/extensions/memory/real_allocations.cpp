#include "real_allocations.h"

#include <optional>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/locks.h"
#include "../../libraries/support/sizes.h"
#include "../support/allocation_limit.h"
#include "device_memory.h"

namespace torchext {

namespace {

// Counts for the threads of one guard. Threads of the backward pass inherit it.
class Reporter final : public AllocationReporter {
 public:
  void reportMemoryUsage(void* address,
                         std::int64_t bytes,
                         std::size_t /*allocated*/,
                         std::size_t /*reserved*/,
                         c10::Device device) override {
    if (!device.is_cpu()) {
      return;
    }
    if (bytes > 0) {
      if (isOwnComputation()) {
        return;
      }
      AllocationCause cause;
      if (const auto node = torch::autograd::get_current_node()) {
        cause.sequence_nr = static_cast<std::int64_t>(node->sequence_nr());
      }
      const Locked lock{LockRank::kRealMemory};
      if (!is_closed_) {
        Allocation*& allocation = allocations_[address];
        if (allocation != nullptr) {  // freed by a thread that does not report
          DeviceMemory::of(device).free(allocation);
        }
        allocation = DeviceMemory::of(device).allocate(toSize(bytes), cause);
      }
    } else if (Allocation* allocation = take(address)) {
      DeviceMemory::of(device).free(allocation);
    }
  }

  void visit(const void* address, c10::function_ref<void(Allocation&)> visit) {
    const Locked lock{LockRank::kRealMemory};
    const auto known = allocations_.find(address);
    if (known != allocations_.end()) {
      const Locked of_allocations{LockRank::kDeviceMemory};
      visit(*known->second);
    }
  }

  // Stops counting, also of live allocations. Other threads may keep the reporter longer: threads of process groups
  // keep the state of the thread that called a collective.
  void close() {
    const Locked lock{LockRank::kRealMemory};
    for (const auto& [address, allocation] : allocations_) {
      DeviceMemory::of(allocation->device).free(allocation);
    }
    allocations_.clear();
    is_closed_ = true;
  }

 private:
  Allocation* take(void* address) {
    const Locked lock{LockRank::kRealMemory};
    const auto known = allocations_.find(address);
    if (known == allocations_.end()) {
      return nullptr;  // allocated before
    }
    Allocation* allocation = known->second;
    allocations_.erase(known);
    return allocation;
  }

  bool is_closed_ = false;
  std::unordered_map<const void*, Allocation*> allocations_;
};

}  // namespace

struct RealAllocationsGuard::State {
  std::shared_ptr<c10::DebugInfoBase> reporter = std::make_shared<Reporter>();
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, reporter};
};

RealAllocationsGuard::RealAllocationsGuard() {
  TORCH_CHECK(!torch::profiler::impl::profilerEnabled(),
              "track_memory() cannot count real tensors: a profiler on this thread receives the allocator's "
              "reports. Enter track_memory() before the profiler.");
  state_ = std::make_unique<State>();
}

RealAllocationsGuard::~RealAllocationsGuard() {
  dynamic_cast<Reporter&>(*state_->reporter).close();
}

void visitCountedAllocation(const c10::Storage& storage, c10::function_ref<void(Allocation&)> visit) {
  if (isFakeStorage(storage)) {
    const Locked lock{LockRank::kDeviceMemory};  // under which allocations are freed
    if (void* allocation = allocationOf(storage)) {
      visit(*static_cast<Allocation*>(allocation));
    }
    return;
  }
  if (auto* reporter = dynamic_cast<Reporter*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE))) {
    reporter->visit(storage.data(), visit);
  }
}

}  // namespace torchext
