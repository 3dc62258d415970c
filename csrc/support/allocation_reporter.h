#pragma once

#include <torch/csrc/profiler/orchestration/observer.h>

namespace torchext {

// What PyTorch's allocators report to (`reportMemoryUsageToProfiler()`), if it is in the place of a profiler on the
// thread. PyTorch takes what is there for one (`ProfilerStateBase::get()`), so it is one, disabled.
class AllocationReporter : public torch::profiler::impl::ProfilerStateBase {
 public:
  AllocationReporter()
      : ProfilerStateBase{torch::profiler::impl::ProfilerConfig{torch::profiler::impl::ProfilerState::Disabled}} {}
  C10_DISABLE_COPY_AND_ASSIGN(AllocationReporter);

  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

  bool memoryProfilingEnabled() const override {
    return true;
  }
};

}  // namespace torchext
