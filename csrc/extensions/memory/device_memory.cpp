#include "device_memory.h"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <iterator>
#include <limits>
#include <string_view>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/util/ApproximateClock.h>
#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>
#include <torch/version.h>

#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/sizes.h"
#include "../../libraries/support/stack_utils.h"
#include "../cuda/fake_cuda.h"

namespace torchext {

using c10::CachingAllocator::AcceleratorAllocatorConfig;
using c10::CachingAllocator::ConfigTokenizer;
using c10::CachingAllocator::format_size;

namespace {

// Far apart, so that an address identifies its device.
std::uintptr_t firstAddressOf(c10::Device device) {
  return (static_cast<std::uintptr_t>(device.index()) + 1) << 44;
}

// Operators that an autograd node runs are backward, except for modules that are recomputed.
MemoryPhase phaseOf(const AllocationCause& cause, const ThreadScope& scope) {
  const bool is_backward = cause.sequence_nr >= 0 && !(scope.phase == MemoryPhase::kForward && scope.is_in_backward);
  return is_backward ? MemoryPhase::kBackward : scope.phase;
}

MemoryCategory categoryOf(const AllocationCause& cause, const ThreadScope& scope) {
  if (cause.category != MemoryCategory::kTemporary) {
    return cause.category;
  }
  if (cause.is_of_kernel) {
    return MemoryCategory::kWorkspace;
  }
  if (cause.communicates) {
    return MemoryCategory::kCommunication;
  }
  return phaseOf(cause, scope) == MemoryPhase::kOther ? MemoryCategory::kInput : MemoryCategory::kTemporary;
}

// The memory of all devices but CUDA's, of pinned memory, and of the CUDA devices.
std::deque<DeviceMemory>& memories() {
  // Leaked: storages are freed at any time.
  static auto* all = [] {
    auto* devices = new std::deque<DeviceMemory>;
    devices->emplace_back(c10::kCPU);
    devices->emplace_back(kPinnedMemory);
    for (std::size_t i = 0; i < kMaxFakeCudaDevices; ++i) {
      devices->emplace_back(c10::Device{c10::kCUDA, static_cast<c10::DeviceIndex>(i)});
    }
    return devices;
  }();
  return *all;
}

// ---- Settings that only a CUDA build of PyTorch parses (`CUDAAllocatorConfig`) ----
//
// c10 parses the others in all builds (`AcceleratorAllocatorConfig`).

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

// The limits of the allocator of pinned memory, in bytes. Releases before 2.13 have none.
struct PinnedSettings {
  std::size_t most_rounded = std::numeric_limits<std::size_t>::max();  // `pinned_max_round_threshold_mb`
  std::size_t most_cached = std::numeric_limits<std::size_t>::max();   // `pinned_max_cached_size_mb`
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

// ---- Errors ----

std::atomic<void (*)(const OutOfMemory& report)> observe_out_of_memory{nullptr};

std::string memoryByCategory(c10::DeviceIndex device) {
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
  std::string text;
  for (const auto& [bytes, name] : parts) {
    text += c10::str(text.empty() ? "The memory is held by " : ", ", name, " (", format_size(bytes), ")");
  }
  return text.empty() ? "No memory is allocated." : text + ".";
}

}  // namespace

void setOutOfMemoryObserver(void (*observe)(const OutOfMemory& report)) noexcept {
  observe_out_of_memory = observe;
}

std::optional<double> memoryFractionIn(const std::string& settings) {
  std::optional<double> fraction;
  const ConfigTokenizer tokens{settings};
  const auto& common = AcceleratorAllocatorConfig::getKeys();
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::string& key = tokens[i];
    i = tokens.skipKey(i);  // to the value, or the end of a list of values
    if (key == "backend") {
      TORCH_CHECK_VALUE(tokens[i] == "native", "The allocator `backend:", tokens[i],
                        "` in PYTORCH_ALLOC_CONF is not simulated on fake CUDA devices. Use `backend:native`.");
    } else if (key == "per_process_memory_fraction") {
      fraction = tokens.toDouble(i);
      TORCH_CHECK_VALUE(*fraction >= 0 && *fraction <= 1,
                        "per_process_memory_fraction is invalid, set it in [0.0, 1.0]");
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
  return fraction < 1 ? fraction : std::nullopt;
}

std::string& userMetadata() noexcept {
  thread_local std::string metadata;
  return metadata;
}

DeviceMemory& DeviceMemory::of(c10::Device device) {
  return memories().at(device.is_cuda() ? toSize(device.index()) + 2 : device == kPinnedMemory ? 1 : 0);
}

bool DeviceMemory::isPinned() const noexcept {
  return device_ == kPinnedMemory;
}

// Takes a block for `bytes` on a device without a simulated allocator, and returns its size. For pinned memory, this is
// the last free block with the same logarithm that is large enough, or any before 2.14, as in
// `CachingHostAllocatorImpl::get_free_block()`.
std::size_t DeviceMemory::takeBlock(std::size_t bytes) {
  std::size_t size = bytes;
  bool is_new = true;
  if (isPinned()) {
    const auto settings = pinnedSettingsOf<AcceleratorAllocatorConfig>(0);
    size = bytes <= settings.most_rounded && bytes <= settings.most_cached ? c10::llvm::PowerOf2Ceil(bytes) : bytes;
    std::vector<std::size_t>& unused = free_blocks_[c10::llvm::Log2_64_Ceil(size)];
    const auto found = std::find_if(unused.rbegin(), unused.rend(), [size](std::size_t free) {
      return free >= size || TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR < 214;
    });
    if (found != unused.rend()) {
      size = *found;
      unused.erase(std::next(found).base());
      is_new = false;
    }
  }
  if (is_new) {
    host_stats_.allocations.increase(1);
    host_stats_.allocated_bytes.increase(size);
  }
  host_stats_.active_requests.increase(1);
  host_stats_.active_bytes.increase(size);
  return size;
}

void DeviceMemory::returnBlock(std::size_t size) noexcept {
  host_stats_.active_requests.decrease(1);
  host_stats_.active_bytes.decrease(size);
  if (isPinned() && size <= pinnedSettingsOf<AcceleratorAllocatorConfig>(0).most_cached) {
    free_blocks_[c10::llvm::Log2_64_Ceil(size)].push_back(size);
  } else {
    releaseBlock(size);
  }
}

void DeviceMemory::releaseBlock(std::size_t size) noexcept {
  host_stats_.allocations.decrease(1);
  host_stats_.allocated_bytes.decrease(size);
}

HostStats DeviceMemory::hostStats() {
  const Locked lock{LockRank::kDeviceMemory};
  followGpu();
  return host_stats_;
}

void DeviceMemory::resetHostStats(bool of_peak) {
  const Locked lock{LockRank::kDeviceMemory};
  HostStats::forEach(host_stats_, [of_peak](const char* /*name*/, MemoryStat& stat) {
    of_peak ? stat.reset_peak() : stat.reset_accumulated();
  });
}

void DeviceMemory::releaseFreeBlocks() {
  const Locked lock{LockRank::kDeviceMemory};
  for (const auto& [logarithm, sizes] : std::exchange(free_blocks_, {})) {
    for (const std::size_t size : sizes) {
      releaseBlock(size);
    }
  }
}

// Configures the allocator for the current fake GPU. After a change of the fake devices it is replaced, as in a new
// process, if no allocations are left. Otherwise live blocks still count, and cached segments are released.
void DeviceMemory::followGpu() {
  const std::uint64_t generation = fakeCudaGeneration();
  if (generation == generation_ && (allocator_ || !device_.is_cuda())) {
    return;
  }
  if (!device_.is_cuda()) {
    generation_ = generation;
    if (allocations_.empty()) {
      free_blocks_.clear();
      host_stats_ = {};
    }
    return;
  }
  const auto fraction = memoryFractionIn(AcceleratorAllocatorConfig::last_allocator_settings());
  generation_ = generation;
  forgetWorkspacesIfAlone();
  const GpuDescription& gpu = fakeGpu();
  const auto capacity = toSize(gpu.total_memory - gpu.context_memory);
  if (!allocator_ || allocations_.empty()) {
    allocator_.emplace(firstAddressOf(device_));
    allocator_->driver().setCapacity(capacity, gpu.is_limited);
    history_.clear();
    observe();
    if (fraction) {
      allocator_->setMemoryFraction(*fraction);
    }
  } else {
    allocator_->driver().setCapacity(capacity, gpu.is_limited);
    allocator_->emptyCache();
    allocator_->stats().resetPeak();
    allocator_->stats().resetAccumulated();
  }
}

void DeviceMemory::observe() {
  if (max_history_ == 0) {
    allocator_->setObserver(nullptr);
    return;
  }
  allocator_->setObserver([this](MemoryAction action, std::uintptr_t address, std::size_t bytes, c10::StreamId stream) {
    history_.push_back({action, address, bytes, stream, c10::getTimeSinceEpoch() / 1000, stack_, userMetadata()});
    if (action == MemoryAction::kAlloc && stack_ != nullptr) {
      stacks_[address] = stack_;
    } else if (action == MemoryAction::kFreeCompleted) {
      stacks_.erase(address);
    }
    if (history_.size() > max_history_) {
      history_.pop_front();
    }
  });
}

// Call it before taking the lock: it takes the interpreter's lock, and a thread that holds that may wait for this one.
std::shared_ptr<const StackTrace> DeviceMemory::stackToRecord(HistoryStacks least) const {
  return history_stacks_.load(std::memory_order_relaxed) < least
             ? nullptr
             : std::make_shared<const StackTrace>(interpreter().stackHere());
}

Allocation* DeviceMemory::allocate(std::size_t bytes, const AllocationCause& cause) {
  auto stack = stackToRecord(HistoryStacks::kOfAllocations);
  std::list<Allocation> made{{device_, bytes, nullptr, cause.op, categoryOf(cause, threadScope()), threadScope().pass}};
  {
    const Locked lock{LockRank::kDeviceMemory};
    followGpu();
    stack_ = std::move(stack);
    Allocation& allocation = made.front();
    bool is_done = true;
    try {
      if (allocator_) {
        setFakeCudaInitialized();
        allocation.block = allocator_->allocate(bytes, currentFakeStream(device_.index()));
      } else {
        allocation.size = takeBlock(bytes);
      }
    } catch (const FailedRequest& request) {
      is_done = false;
      bytes = request.bytes;
    }
    stack_ = nullptr;
    if (is_done) {
      allocations_.splice(allocations_.begin(), made);
      allocation.place = allocations_.begin();
      if (const auto timeline = isTracking() ? currentTimeline() : nullptr) {
        allocation.number = timeline->addBirth(recordOf(allocation, cause), cause.sequence_nr, reserved());
      }
      return &allocation;
    }
  }
  raiseOutOfMemory(bytes);
}

// Workspaces do not keep the allocator alive.
void DeviceMemory::forgetWorkspacesIfAlone() {
  if (allocations_.size() == workspaces_.size()) {
    forgetWorkspacesLocked();
  }
}

void DeviceMemory::forgetWorkspacesLocked() {
  for (const auto& [key, workspace] : std::exchange(workspaces_, {})) {
    freeLocked(workspace);
  }
}

void DeviceMemory::forgetWorkspaces() {
  const Locked lock{LockRank::kDeviceMemory};
  forgetWorkspacesLocked();
}

void DeviceMemory::keepWorkspace(WorkspaceKey key, std::size_t bytes, const AllocationCause& cause) {
  const std::tuple place{key.number, key.is_for_backward, currentFakeStream(device_.index())};
  {
    const Locked lock{LockRank::kDeviceMemory};
    followGpu();
    const auto known = workspaces_.find(place);
    if (known != workspaces_.end() && known->second->bytes >= bytes) {
      return;
    }
  }
  Allocation* workspace = allocate(bytes, cause);
  const Locked lock{LockRank::kDeviceMemory};
  if (Allocation* outgrown = std::exchange(workspaces_[place], workspace)) {
    freeLocked(outgrown);
  }
}

void DeviceMemory::free(Allocation* allocation) noexcept {
  std::shared_ptr<const StackTrace> stack;
  try {
    stack = stackToRecord(HistoryStacks::kOfAll);
  } catch (const std::exception&) {  // a destructor calls this function, so a free is recorded without a stack
  }
  const Locked lock{LockRank::kDeviceMemory};
  stack_ = std::move(stack);
  freeLocked(allocation);
  stack_ = nullptr;
}

void DeviceMemory::freeLocked(Allocation* allocation) noexcept {
  if (allocation->block != nullptr) {
    allocator_->free(allocation->block);
  } else {
    returnBlock(allocation->size);
  }
  if (const auto timeline = isTracking() ? currentTimeline() : nullptr) {
    timeline->addDeath(allocation->number, reserved());
  }
  allocations_.erase(allocation->place);
}

void DeviceMemory::recordStream(const Allocation& allocation, c10::StreamId stream) {
  checkHolds(LockRank::kDeviceMemory);
  if (allocation.block != nullptr) {
    allocator_->recordStream(allocation.block, stream);
  }
}

AllocationRecord DeviceMemory::recordOf(const Allocation& allocation, const AllocationCause& cause) const {
  const ThreadScope& scope = threadScope();
  const Block* block = allocation.block;
  return {
      device_.is_cuda() ? device_.index()
      : isPinned()      ? -2
                        : -1,
      allocation.bytes,
      block == nullptr ? allocation.size : block->size,
      allocation.op,
      scope.scope,
      cause.line,
      phaseOf(cause, scope),
      allocation.category,
      block == nullptr ? 0 : block->address,
      block == nullptr ? 0 : block->stream,
  };
}

std::size_t DeviceMemory::reserved() const {
  return allocator_ ? toSize(totalOf(allocator_->stats().reserved_bytes).current)
                    : toSize(host_stats_.allocated_bytes.current);
}

// Raises `torch.OutOfMemoryError` with the text of CUDACachingAllocator.cpp and, if memory is tracked, the bytes of
// each category.
void DeviceMemory::raiseOutOfMemory(std::size_t bytes) {
  OutOfMemory report{};
  {
    const Locked lock{LockRank::kDeviceMemory};
    report = {
        device_.index(),
        bytes,
        toSize(fakeGpu().total_memory),
        allocator_->driver().available(),
        allocator_->allowed(),
        toSize(totalOf(allocator_->stats().allocated_bytes).current),
        reserved(),
    };
  }
  if (const auto observe = observe_out_of_memory.load()) {
    observe(report);
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", format_size(report.requested), ". GPU ",
      static_cast<int>(report.device), " has a total capacity of ", format_size(report.capacity), " of which ",
      format_size(report.free), " is free. ", report.allowed ? format_size(*report.allowed) + " allowed; " : "",
      "Of the allocated memory ", format_size(report.allocated), " is allocated by PyTorch, and ",
      format_size(report.reserved - report.allocated),
      " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
      "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation. The GPU is a fake one of torchext. ",
      memoryByCategory(report.device));
}

void DeviceMemory::recordHistory(bool enabled, std::size_t max_entries, HistoryStacks stacks) {
  const Locked lock{LockRank::kDeviceMemory};
  followGpu();
  max_history_ = enabled ? max_entries : 0;
  if (!enabled) {
    history_.clear();
    stacks_.clear();
  }
  history_stacks_ = enabled ? stacks : HistoryStacks::kNone;
  observe();
}

bool DeviceMemory::isHistoryRecorded() const {
  const Locked lock{LockRank::kDeviceMemory};
  return max_history_ > 0;
}

bool DeviceMemory::hasAllocations() const {
  const Locked lock{LockRank::kDeviceMemory};
  return !allocations_.empty();
}

std::vector<TraceEntry> DeviceMemory::history() {
  const Locked lock{LockRank::kDeviceMemory};
  return {history_.begin(), history_.end()};
}

std::shared_ptr<const StackTrace> DeviceMemory::stackOf(std::uintptr_t address) const {
  const auto found = stacks_.find(address);
  return found == stacks_.end() ? nullptr : found->second;
}

void DeviceMemory::reportExisting(Timeline& timeline) {
  const Locked lock{LockRank::kDeviceMemory};
  if (allocator_ || !device_.is_cuda()) {
    followGpu();
  }
  for (Allocation& allocation : allocations_) {
    AllocationRecord record = recordOf(allocation, {});
    record.scope = -1;
    allocation.number = timeline.addExisting(record);
  }
}

void reportExistingAllocations(Timeline& timeline) {
  for (DeviceMemory& memory : memories()) {
    memory.reportExisting(timeline);
  }
}

}  // namespace torchext
