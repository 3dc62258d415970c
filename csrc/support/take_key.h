#pragma once

#include <atomic>

#include <c10/core/DispatchKey.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

namespace torchext {

// A dispatch key that is taken when it is first needed, because other libraries may want it, too: a program that only
// imports torchext, or uses another part of it, does not touch the key.
class LazyKey {
 public:
  // What to do if the key has a fallback that is not ours.
  enum class IfTaken { kRaises, kShares };

  // `usage` says what needs the key, as the beginning of a sentence.
  constexpr LazyKey(c10::DispatchKey key, const char* usage, IfTaken if_taken = IfTaken::kRaises)
      : key_{key}, usage_{usage}, if_taken_{if_taken} {}

  // Calls `take` the first time, and again if it has raised. If the key has a fallback that is not ours, raises an
  // error that names `usage`, or leaves it to `take` to share the key.
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

// Has `prepare` called before the first key is taken: what it raises is raised there, and it is called again the next
// time. To be set while the library is loaded.
void beforeFirstKey(void (*prepare)()) noexcept;

// Puts a fallback on a key, for good.
void registerFallback(c10::DispatchKey key, torch::CppFunction&& fallback);

}  // namespace torchext
