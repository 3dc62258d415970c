#include "device_memory.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <exception>
#include <iterator>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>
#include <torch/version.h>

#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/sizes.h"
#include "../cuda/fake_cuda.h"
#include "cuda_settings.h"
#include "out_of_memory.h"

namespace torchext {

namespace {

constexpr std::size_t kMaxCudaDevices = 64;

std::int64_t nowInMicroseconds() {
  return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

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

}  // namespace

std::string& userMetadata() noexcept {
  thread_local std::string metadata;
  return metadata;
}

DeviceMemory& DeviceMemory::of(c10::Device device) {
  // Leaked: storages are freed at any time.
  static auto* others = new DeviceMemory{c10::kCPU};
  static auto* pinned = new DeviceMemory{kPinnedMemory};
  if (!device.is_cuda()) {
    return device == kPinnedMemory ? *pinned : *others;
  }
  static auto* cuda = [] {
    auto* devices = new std::array<std::unique_ptr<DeviceMemory>, kMaxCudaDevices>;
    for (std::size_t i = 0; i < kMaxCudaDevices; ++i) {
      (*devices)[i] = std::make_unique<DeviceMemory>(c10::Device{c10::kCUDA, static_cast<c10::DeviceIndex>(i)});
    }
    return devices;
  }();
  return *cuda->at(toSize(device.index()));
}

DeviceMemory::DeviceMemory(c10::Device device) : device_{device} {}

DeviceMemory::~DeviceMemory() = default;

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
    const PinnedSettings settings = pinnedSettings();
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
  if (isPinned() && size <= pinnedSettings().most_cached) {
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
    if (first_ == nullptr) {
      free_blocks_.clear();
      host_stats_ = {};
    }
    return;
  }
  const CudaSettings settings = cudaSettings();
  generation_ = generation;
  forgetWorkspacesIfAlone();
  const GpuDescription& gpu = fakeGpu();
  const auto capacity = toSize(gpu.total_memory - gpu.context_memory);
  if (!allocator_ || first_ == nullptr) {
    allocator_.emplace(firstAddressOf(device_));
    allocator_->driver().setCapacity(capacity, gpu.is_limited);
    history_.clear();
    observe();
    if (settings.memory_fraction) {
      allocator_->setMemoryFraction(*settings.memory_fraction);
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
    history_.push_back({action, address, bytes, stream, nowInMicroseconds(), stack_, userMetadata()});
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
  auto allocation = std::make_unique<Allocation>(
      Allocation{device_, bytes, nullptr, cause.op, categoryOf(cause, threadScope()), threadScope().pass});
  {
    const Locked lock{LockRank::kDeviceMemory};
    followGpu();
    stack_ = std::move(stack);
    try {
      if (allocator_) {
        setFakeCudaInitialized();
        allocation->block = allocator_->allocate(bytes, currentFakeStream(device_.index()));
      } else {
        allocation->size = takeBlock(bytes);
      }
    } catch (const FailedRequest& request) {
      allocation.reset();
      bytes = request.bytes;
    }
    stack_ = nullptr;
    if (allocation != nullptr) {
      allocation->next = first_;
      if (first_ != nullptr) {
        first_->previous = allocation.get();
      }
      first_ = allocation.get();
      if (const auto timeline = isTracking() ? currentTimeline() : nullptr) {
        allocation->number = timeline->addBirth(recordOf(*allocation, cause), reserved());
      }
      return allocation.release();
    }
  }
  raiseOutOfMemory(bytes);
}

// Workspaces do not keep the allocator alive.
void DeviceMemory::forgetWorkspacesIfAlone() {
  std::size_t num_allocations = 0;
  for (const Allocation* allocation = first_; allocation != nullptr; allocation = allocation->next) {
    ++num_allocations;
  }
  if (num_allocations == workspaces_.size()) {
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
  const std::unique_ptr<Allocation> owner{allocation};
  if (allocation->next != nullptr) {
    allocation->next->previous = allocation->previous;
  }
  (allocation->previous == nullptr ? first_ : allocation->previous->next) = allocation->next;
  if (allocation->block != nullptr) {
    allocator_->free(allocation->block);
  } else {
    returnBlock(allocation->size);
  }
  if (const auto timeline = isTracking() ? currentTimeline() : nullptr) {
    timeline->addDeath(allocation->number, reserved());
  }
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
      device_,
      block == nullptr ? 0 : block->stream,
      allocation.bytes,
      block == nullptr ? allocation.size : block->size,
      block == nullptr ? 0 : block->address,
      allocation.op,
      scope.scope,
      cause.line,
      cause.sequence_nr,
      phaseOf(cause, scope),
      allocation.category,
  };
}

std::size_t DeviceMemory::reserved() const {
  return allocator_ ? toSize(totalOf(allocator_->stats().reserved_bytes).current)
                    : toSize(host_stats_.allocated_bytes.current);
}

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
  raise(report);
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
  return first_ != nullptr;
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
  for (Allocation* allocation = first_; allocation != nullptr; allocation = allocation->next) {
    AllocationRecord record = recordOf(*allocation, {});
    record.scope = -1;
    allocation->number = timeline.addExisting(record);
  }
}

void reportExistingAllocations(Timeline& timeline) {
  DeviceMemory::of(c10::kCPU).reportExisting(timeline);
  DeviceMemory::of(kPinnedMemory).reportExisting(timeline);
  for (std::size_t i = 0; i < kMaxCudaDevices; ++i) {
    DeviceMemory::of({c10::kCUDA, static_cast<c10::DeviceIndex>(i)}).reportExisting(timeline);
  }
}

}  // namespace torchext
