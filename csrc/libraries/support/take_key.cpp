#include "take_key.h"

#include <cstdint>
#include <utility>

#include <ATen/core/dispatch/Dispatcher.h>

#include "locks.h"

namespace torchext {

using c10::DispatchKey;

namespace {

// Constant-initialized, so that other files can set it while the library is loaded.
void (*prepareForKeys)() = [] {};

void checkKeyIsFree(DispatchKey key, const char* usage) {
  TORCH_CHECK(!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key), usage, " the dispatch key `",
              c10::toString(key),
              "`, which already has a fallback, registered by another library or by this version of PyTorch, and can "
              "have only one. Use torchext in a process that does not load that library.");
}

}  // namespace

void beforeFirstKey(void (*prepare)()) noexcept {
  prepareForKeys = prepare;
}

void LazyKey::takeSlowly(c10::function_ref<void()> take) {
  prepareForKeys();
  const Locked lock{LockRank::kKeys};
  if (is_taken_.load(std::memory_order_relaxed)) {
    return;
  }
  if (if_taken_ == IfTaken::kRaises) {
    checkKeyIsFree(key_, usage_);
  }
  take();
  is_taken_.store(true, std::memory_order_release);
}

torch::Library& permanentLibrary(DispatchKey key, const std::string& name_space, const char* file, int line) {
  return *new torch::Library(torch::Library::IMPL, name_space, key, file, static_cast<std::uint32_t>(line));
}

void registerFallback(DispatchKey key, torch::CppFunction&& fallback) {
  permanentLibrary(key, "_").fallback(std::move(fallback));
}

}  // namespace torchext
