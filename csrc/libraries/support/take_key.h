#pragma once

#include <atomic>
#include <initializer_list>
#include <string>

#include <c10/core/DispatchKey.h>
#include <c10/util/FunctionRef.h>
#include <torch/library.h>

namespace torchext {

// A dispatch key that is taken when it is first needed, because other libraries may need it. A program that only
// imports torchext, or uses other parts of it, does not touch the key.
class LazyKey {
 public:
  // The reaction if another library has registered a fallback for the key.
  enum class IfTaken { kRaises, kShares };

  // `usage` names the feature that needs the key, as the beginning of a sentence.
  constexpr LazyKey(c10::DispatchKey key, const char* usage, IfTaken if_taken = IfTaken::kRaises)
      : key_{key}, usage_{usage}, if_taken_{if_taken} {}

  // Calls `take` the first time, and again if it raised. If another library has registered a fallback for the key,
  // raises an error that begins with `usage`, or, with `kShares`, lets `take` share the key.
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

// Sets `prepare`, which is called before the first key is taken. Errors that it raises are raised there, and it is
// called again the next time. Call this while the library is loaded.
void beforeFirstKey(void (*prepare)()) noexcept;

// Makes a library for kernels on `key`. It is never destroyed: its kernels may run until the process ends. PyTorch
// reports the line of the call as their source.
torch::Library& permanentLibrary(c10::DispatchKey key,
                                 const std::string& name_space = "aten",
                                 const char* file = __builtin_FILE(),
                                 int line = __builtin_LINE());

// Registers a permanent fallback for a key.
void registerFallback(c10::DispatchKey key, torch::CppFunction&& fallback);

// Registers the boxed kernel `kKernel` for the operators `names`.
template <c10::BoxedKernel::BoxedKernelFunction_withDispatchKeys* kKernel,
          typename Names = std::initializer_list<const char*>>
void implement(torch::Library& library, const Names& names) {
  for (const char* name : names) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<kKernel>());
  }
}

}  // namespace torchext
