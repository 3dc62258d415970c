#pragma once

#include <optional>

#include <ATen/record_function.h>
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

}  // namespace torchext
