#include "out_of_memory.h"

#include <array>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include "../../libraries/support/locks.h"
#include "timeline.h"

namespace torchext {

using c10::CachingAllocator::format_size;

namespace {

std::string memoryByCategory(c10::Device device) {
  const auto timeline = currentTimeline();
  if (timeline == nullptr) {
    return "Run the program inside torchext.memory.track_memory() to list the memory by category.";
  }
  static constexpr std::array<const char*, kNumMemoryCategories> kNames{
      "temporaries",     "activations", "inputs", "communication buffers", "workspaces", "gradients",
      "optimizer state", "parameters",  "caches"};
  const BytesByCategory bytes_by_category = timeline->liveBytes(device);
  std::multimap<std::size_t, const char*, std::greater<>> parts;
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (bytes_by_category[i] > 0) {
      parts.emplace(bytes_by_category[i], kNames[i]);
    }
  }
  if (parts.empty()) {
    return "No memory is allocated.";
  }
  std::ostringstream text;
  text << "The memory is held by";
  const char* separator = " ";
  for (const auto& [bytes, name] : parts) {
    text << separator << name << " (" << format_size(bytes) << ")";
    separator = ", ";
  }
  text << ".";
  return text.str();
}

using Observers = std::vector<std::function<void(const OutOfMemory&)>>;

Observers& observers() {
  static auto* all = new Observers;  // leaked: Python functions outlive the interpreter
  return *all;
}

}  // namespace

void addOutOfMemoryObserver(std::function<void(const OutOfMemory&)> observer) {
  const Locked lock{LockRank::kDeviceMemory};
  observers().push_back(std::move(observer));
}

void forgetOutOfMemoryObservers() {
  Observers forgotten;
  const Locked lock{LockRank::kDeviceMemory};
  forgotten.swap(observers());
}

void raise(const OutOfMemory& report) {
  Observers called;
  {
    const Locked lock{LockRank::kDeviceMemory};
    called = observers();
  }
  for (const auto& observer : called) {
    observer(report);
  }
  std::string allowed;
  if (report.allowed) {
    allowed = format_size(*report.allowed) + " allowed; ";
  }
  TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(report.requested),
                   ". GPU ", static_cast<int>(report.device), " has a total capacity of ", format_size(report.capacity),
                   " of which ", format_size(report.free), " is free. ", allowed, "Of the allocated memory ",
                   format_size(report.allocated), " is allocated by PyTorch, and ",
                   format_size(report.reserved - report.allocated),
                   " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
                   "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation. The GPU is a fake one of "
                   "torchext. ",
                   memoryByCategory({c10::kCUDA, report.device}));
}

}  // namespace torchext
