#include "real_allocations.h"

#include <mutex>
#include <optional>
#include <unordered_map>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/function.h>

#include "../fake/storage/storage_memory.h"
#include "../support/open_blocks.h"
#include "device_memory.h"

namespace torchext {

namespace {

// The threads of one guard: those of the backward pass inherit it.
class Reporter final : public c10::MemoryReportingInfoBase {
 public:
  bool memoryProfilingEnabled() const override {
    return true;
  }

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
      Allocation* allocation = DeviceMemory::of(device).allocate(static_cast<std::size_t>(bytes), cause);
      const std::lock_guard<std::mutex> lock(mutex_);
      allocations_[address] = allocation;
    } else if (Allocation* allocation = take(address)) {
      DeviceMemory::of(device).free(allocation);
    }
  }

  ~Reporter() override {
    for (const auto& [address, allocation] : allocations_) {
      DeviceMemory::of(allocation->device).free(allocation);
    }
  }

 private:
  Allocation* take(void* address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = allocations_.find(address);
    if (known == allocations_.end()) {
      return nullptr;  // allocated before
    }
    Allocation* allocation = known->second;
    allocations_.erase(known);
    return allocation;
  }

  std::mutex mutex_;
  std::unordered_map<void*, Allocation*> allocations_;
};

}  // namespace

struct RealAllocationsGuard::State {
  c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, std::make_shared<Reporter>()};
};

RealAllocationsGuard::RealAllocationsGuard() : state_{std::make_unique<State>()} {}

RealAllocationsGuard::~RealAllocationsGuard() = default;

void enterRealAllocations() {
  OpenGuards<RealAllocationsGuard>::enter(kAnybody);
}

void leaveRealAllocations() {
  OpenGuards<RealAllocationsGuard>::leave(kAnybody, "track_memory()");
}

}  // namespace torchext
