#pragma once

#include <cstddef>
#include <memory>
#include <optional>

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

namespace torchext {

// While it lives, the user's profiler does not record the operators that are called on this thread. Without a profiler
// it does nothing: the guard takes a PyTorch lock that all threads share and that a forked child may find locked.
class NoObservers {
 public:
  NoObservers() {
    if (torch::profiler::impl::profilerEnabled()) {
      guard_.emplace(/*is_enabled=*/false);
    }
  }

 private:
  std::optional<at::RecordFunctionGuard> guard_;
};

// While it lives, a request for more than `max_bytes` at once to PyTorch's CPU allocator raises std::bad_alloc on this
// thread, before the memory is touched. Kernels check their arguments before they allocate results, so this shows which
// calls they refuse without computing the ones that they accept.
//
// The limit is installed in place of a profiler, because the allocator reports to profilers only. The user's profiler
// does not observe this thread in the meantime: it would mistake the installed object for its own state.
//
// That relies on the order of statements in PyTorch's allocator, see `testAllocationLimit()`.
class AllocationLimit {
 public:
  explicit AllocationLimit(std::size_t max_bytes);

 private:
  NoObservers no_observers_;
  std::shared_ptr<c10::DebugInfoBase> reporter_;
  c10::DebugInfoGuard guard_;
};

// Returns true if PyTorch's CPU allocator reports memory before it has an owner: otherwise a reporter that frees it and
// raises would free it twice. `is_broken`: for tests.
bool testAllocationLimit(bool is_broken);

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
