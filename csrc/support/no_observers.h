#pragma once

#include <optional>

#include <ATen/record_function.h>
#include <torch/csrc/profiler/orchestration/observer.h>

namespace torchext {

// While it lives, a profiler of the user's does not see the operators that are called on this thread. Without a
// profiler it does nothing: the guard takes a lock of PyTorch's that all threads share, and that a child of a fork may
// find held.
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

}  // namespace torchext
