#include "cuda_settings.h"

#include <array>
#include <string>
#include <string_view>

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include "../../libraries/support/stack_utils.h"

namespace torchext {

using c10::CachingAllocator::AcceleratorAllocatorConfig;
using c10::CachingAllocator::ConfigTokenizer;

namespace {

// Settings of `CUDAAllocatorConfig::getKeys()` of all releases without effect here. They concern pinned memory, locks
// and graphs.
constexpr std::array<std::string_view, 6> kFlags{
    "graph_capture_record_stream_reuse", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",        "release_lock_on_hipmalloc",     "throw_on_cudamalloc_oom",
};
constexpr std::array<std::string_view, 4> kOthers{
    "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
    "pinned_free_catch_all",
    "pinned_reserve_segment_size_mb",
};

// The accessors exist since the settings do.
template <typename Config>
auto pinnedSettingsOf(int /*preferred*/) -> decltype(Config::pinned_max_cached_size(), PinnedSettings{}) {
  return {Config::pinned_max_round_threshold(), Config::pinned_max_cached_size()};
}

template <typename Config>
PinnedSettings pinnedSettingsOf(...) {
  return {};
}

// Like `CUDAAllocatorConfig::parsePinnedNumRegisterThreads()`.
void checkThreads(std::size_t threads) {
  TORCH_CHECK_VALUE(threads != 0 && (threads & (threads - 1)) == 0,
                    "Number of register threads has to be power of 2, got ", threads);
  TORCH_CHECK_VALUE(threads <= 128, "Number of register threads should be less than or equal to 128, got ", threads);
}

double fractionIn(const ConfigTokenizer& tokens, std::size_t at) {
  const double fraction = tokens.toDouble(at);
  TORCH_CHECK_VALUE(fraction >= 0 && fraction <= 1, "per_process_memory_fraction is invalid, set it in [0.0, 1.0]");
  return fraction;
}

void checkBackend(const std::string& backend) {
  TORCH_CHECK_VALUE(backend == "native", "The allocator `backend:", backend,
                    "` in PYTORCH_ALLOC_CONF is not simulated ", "on fake CUDA devices. Use `backend:native`.");
}

}  // namespace

PinnedSettings pinnedSettings() noexcept {
  return pinnedSettingsOf<AcceleratorAllocatorConfig>(0);
}

CudaSettings cudaSettings() {
  return cudaSettings(AcceleratorAllocatorConfig::last_allocator_settings());
}

CudaSettings cudaSettings(const std::string& text) {
  CudaSettings settings;
  const ConfigTokenizer tokens{text};
  const auto& common = AcceleratorAllocatorConfig::getKeys();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string& key = tokens[i];
    i = tokens.skipKey(i);  // to the value, or the end of a list of values
    if (key == "backend") {
      checkBackend(tokens[i]);
    } else if (key == "per_process_memory_fraction") {
      const double fraction = fractionIn(tokens, i);
      settings.memory_fraction = fraction < 1 ? std::optional{fraction} : std::nullopt;
    } else if (isAmong(kFlags, key)) {
      static_cast<void>(tokens.toBool(i));  // checks it
    } else if (key == "pinned_num_register_threads") {
      checkThreads(tokens.toSizeT(i));
    } else {
      TORCH_CHECK_VALUE(common.count(key) != 0 || isAmong(kOthers, key), "Unrecognized key '", key,
                        "' in Accelerator allocator config.");
    }
    ++i;  // a comma
  }
  return settings;
}

}  // namespace torchext
