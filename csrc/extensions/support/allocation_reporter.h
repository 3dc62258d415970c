#pragma once

#include <torch/csrc/profiler/orchestration/observer.h>

namespace torchext {

// Receives reports from PyTorch's allocators on a thread (`reportMemoryUsageToProfiler()`), installed in place of a
// profiler. PyTorch casts it to a profiler state (`ProfilerStateBase::get()`), so it is one, disabled.
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
