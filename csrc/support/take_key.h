#pragma once

#include <atomic>

#include <c10/core/DispatchKey.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

namespace torchext {

// A dispatch key that is taken when it is first needed, because others may want it as well: a program that only imports
// torchext, or uses another part of it, leaves the key alone.
class LazyKey {
 public:
  // What happens when the key has a fallback that is not ours.
  enum class IfTaken { kRaises, kShares };

  // `usage` tells what the key is needed for, as the subject of a sentence.
  constexpr LazyKey(c10::DispatchKey key, const char* usage, IfTaken if_taken = IfTaken::kRaises)
      : key_{key}, usage_{usage}, if_taken_{if_taken} {}

  // Calls `take` when this is the first call that comes to it, and again after it has raised. When the key has a
  // fallback that is not ours, raises an error that names `usage`, or leaves it to `take` to share the key.
  void take(c10::function_ref<void()> take) {
    if (!is_taken_.load(std::memory_order_acquire)) {
      takeSlowly(take);
    }
  }

 private:
  void takeSlowly(c10::function_ref<void()> take);

  const c10::DispatchKey key_;
  const char* const usage_;
  const IfTaken if_taken_;
  std::atomic<bool> is_taken_ = false;
};

// Puts a fallback on a key, for good.
void registerFallback(c10::DispatchKey key, torch::CppFunction&& fallback);

// Held while the process forks: keys are taken with locks of PyTorch's held.
void lockKeys();
void unlockKeys();

}  // namespace torchext
