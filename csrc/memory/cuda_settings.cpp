#include "cuda_settings.h"

#include <array>
#include <string>
#include <string_view>

#include <c10/core/AllocatorConfig.h>
#include <c10/util/Exception.h>

#include "../support/stack_utils.h"

namespace torchext {

using c10::CachingAllocator::AcceleratorAllocatorConfig;
using c10::CachingAllocator::ConfigTokenizer;

namespace {

// `CUDAAllocatorConfig::getKeys()` of all releases, those that concern pinned memory, locks and graphs.
constexpr std::array<std::string_view, 11> kWithoutEffect{
    "expandable_segments_reserve",       "expandable_segments_reserve_by_class",
    "graph_capture_record_stream_reuse", "pinned_free_catch_all",
    "pinned_num_register_threads",       "pinned_reserve_segment_size_mb",
    "pinned_use_cuda_host_register",     "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",        "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
};

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

CudaSettings cudaSettings() {
  CudaSettings settings;
  const ConfigTokenizer tokens{AcceleratorAllocatorConfig::last_allocator_settings()};
  const auto& common = AcceleratorAllocatorConfig::getKeys();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string& key = tokens[i];
    i = tokens.skipKey(i);  // to the value, or the end of a list of values
    if (key == "backend") {
      checkBackend(tokens[i]);
    } else if (key == "per_process_memory_fraction") {
      const double fraction = fractionIn(tokens, i);
      settings.memory_fraction = fraction < 1 ? std::optional{fraction} : std::nullopt;
    } else {
      TORCH_CHECK_VALUE(common.count(key) != 0 || isAmong(kWithoutEffect, key), "Unrecognized key '", key,
                        "' in Accelerator allocator config.");
    }
    ++i;  // a comma
  }
  return settings;
}

}  // namespace torchext
