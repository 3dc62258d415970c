#include "allocation_limit.h"

#include <cstdint>
#include <new>

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "allocation_reporter.h"

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
    if (device.is_cpu() && bytes > 0 && static_cast<std::size_t>(bytes) > max_bytes_) {
      c10::profiledCPUMemoryReporter().Delete(address);
      c10::free_cpu(address);
      throw std::bad_alloc{};
    }
  }

 private:
  std::size_t max_bytes_;
};

}  // namespace

AllocationLimit::AllocationLimit(std::size_t max_bytes)
    : reporter_{std::make_shared<Reporter>(max_bytes)}, guard_{c10::DebugInfoKind::PROFILER_STATE, reporter_} {}

}  // namespace torchext
