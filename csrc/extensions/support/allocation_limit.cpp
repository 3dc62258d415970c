#include "allocation_limit.h"

#include <cstdint>
#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "../../libraries/support/sizes.h"

namespace torchext {

namespace {

class Reporter final : public AllocationReporter {
 public:
  explicit Reporter(std::size_t max_bytes) : max_bytes_{max_bytes} {}

  // `DefaultCPUAllocator::allocate()` reports before the memory has an owner, so a reporter that raises must free it.
  void reportMemoryUsage(void* address,
                         std::int64_t bytes,
                         std::size_t /*allocated*/,
                         std::size_t /*reserved*/,
                         c10::Device device) override {
    if (device.is_cpu() && bytes > 0 && toSize(bytes) > max_bytes_) {
      c10::profiledCPUMemoryReporter().Delete(address);
      c10::free_cpu(address);
      throw std::bad_alloc{};
    }
  }

 private:
  std::size_t max_bytes_;
};

// Raises at the first report of new memory, without freeing it, and records whether PyTorch frees it then.
class ReporterForTest final : public AllocationReporter {
 public:
  void reportMemoryUsage(void* address,
                         std::int64_t bytes,
                         std::size_t /*allocated*/,
                         std::size_t /*reserved*/,
                         c10::Device /*device*/) override {
    if (bytes > 0) {
      reported = address;
      throw std::bad_alloc{};
    }
    is_freed = is_freed || address == reported;
  }

  void* reported = nullptr;
  bool is_freed = false;
};

}  // namespace

bool testAllocationLimit(bool is_broken) {
  const NoObservers no_observers;
  const auto reporter = std::make_shared<ReporterForTest>();
  const c10::DebugInfoGuard guard{c10::DebugInfoKind::PROFILER_STATE, reporter};
  try {
    static_cast<void>(c10::GetDefaultCPUAllocator()->allocate(1));
  } catch (const std::bad_alloc&) {
  }
  const bool has_no_owner = reporter->reported != nullptr && !reporter->is_freed;
  if (has_no_owner) {
    c10::profiledCPUMemoryReporter().Delete(reporter->reported);
    c10::free_cpu(reporter->reported);
  }
  return has_no_owner && !is_broken;
}

AllocationLimit::AllocationLimit(std::size_t max_bytes)
    : reporter_{std::make_shared<Reporter>(max_bytes)}, guard_{c10::DebugInfoKind::PROFILER_STATE, reporter_} {}

}  // namespace torchext
