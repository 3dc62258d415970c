#pragma once

// The memory of fake devices: one simulated allocator for each fake CUDA device of the process, and sums for all other
// devices.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <torchext/macros.h>

#include "../../libraries/caching_allocator/caching_allocator.h"
#include "../../libraries/support/interpreter.h"
#include "../../libraries/support/locks.h"
#include "timeline.h"

namespace torchext {

// Bytes on a device, held by a fake storage or by a running kernel.
struct Allocation {
  c10::Device device;
  std::size_t bytes;  // as requested
  Block* block;       // null on devices without an allocator
  const char* op;     // the operator that allocated it, or null
  MemoryCategory category;
  ForwardPass pass = {};     // the pass that allocated it
  bool is_presumed = false;  // whether a definite category may replace `category`
  AllocationNumber number = {};
  std::size_t size = 0;                        // of its block, on devices without an allocator
  std::list<Allocation>::iterator place = {};  // in the list of the device
};

using StackTrace = std::vector<StackFrame>;

// The entries of the history that record a stack.
enum class HistoryStacks : std::uint8_t { kNone, kOfAllocations, kOfAll };

// An action of the allocator, as `torch.cuda.memory._snapshot()` lists it.
struct TraceEntry {
  MemoryAction action;
  std::uintptr_t address;
  std::size_t bytes;
  c10::StreamId stream;
  std::int64_t time_us;                     // since the epoch
  std::shared_ptr<const StackTrace> stack;  // null if not recorded
  std::string metadata;                     // of the thread: `userMetadata()`
};

// The text that entries of this thread carry, set by `torch.cuda.memory._set_memory_metadata()`.
TORCHEXT_API std::string& userMetadata() noexcept;

// The cause of an allocation.
struct AllocationCause {
  const char* op = nullptr;       // the name of the operator; lives as long as the process
  bool is_of_kernel = false;      // allocated by a kernel besides its results
  bool communicates = false;      // allocated by a collective, or for one
  std::int64_t sequence_nr = -1;  // of the autograd node that is running
  std::int32_t line = -1;         // the number of the source line, if lines are traced
  // The category of the storage when it last had memory.
  MemoryCategory category = MemoryCategory::kTemporary;
};

// The blocks that a thread keeps for each device and stream. In PyTorch they belong to the cuBLAS handle of the thread:
// a backward pass, which runs on an autograd thread, needs its own.
enum WorkspaceNumber : std::uint8_t { kCublasWorkspace, kCublasLtWorkspace };

// A workspace, and which thread of a real GPU program owns it: that of forward or of backward passes.
struct WorkspaceKey {
  WorkspaceNumber number;
  bool is_for_backward;
};

// Why a request failed, in bytes.
struct OutOfMemory {
  c10::DeviceIndex device;
  std::size_t requested;  // from the driver
  std::size_t capacity;
  std::size_t free;
  std::optional<std::size_t> allowed;  // by `torch.cuda.set_per_process_memory_fraction()`
  std::size_t allocated;
  std::size_t reserved;
};

// Sets a function that is called before each c10::OutOfMemoryError, on the thread that raises it, without locks.
TORCHEXT_API void setOutOfMemoryObserver(void (*observe)(const OutOfMemory& report)) noexcept;

// Returns `per_process_memory_fraction` in the settings `PYTORCH_ALLOC_CONF`, if it is less than 1. Throws
// c10::ValueError for a setting that PyTorch does not define, as a CUDA build does at its first tensor, and for the
// backend `cudaMallocAsync`, which is not simulated.
TORCHEXT_API std::optional<double> memoryFractionIn(const std::string& settings);

// The memory of one device. Thread-safe.
class TORCHEXT_API DeviceMemory {
 public:
  // Returns the memory of `device`, which must have an index.
  static DeviceMemory& of(c10::Device device);

  explicit DeviceMemory(c10::Device device) : device_{device} {}
  C10_DISABLE_COPY_AND_ASSIGN(DeviceMemory);
  ~DeviceMemory() = default;

  // Allocates on the current stream of this thread. Throws c10::OutOfMemoryError.
  Allocation* allocate(std::size_t bytes, const AllocationCause& cause);
  void free(Allocation* allocation) noexcept;
  // The caller holds the lock `kDeviceMemory`.
  void recordStream(const Allocation& allocation, c10::StreamId stream);

  // Ensures a workspace of at least `bytes` for the current stream of this thread, and keeps it.
  void keepWorkspace(WorkspaceKey key, std::size_t bytes, const AllocationCause& cause);

  // Frees all workspaces.
  void forgetWorkspaces();

  // The following functions are for pinned memory only.

  HostStats hostStats();
  void resetHostStats(bool of_peak);
  void releaseFreeBlocks();

  // The following functions are for CUDA devices only.

  // Calls `use` with the allocator, holding the lock for allocations and frees. So `use` must not create Python
  // objects: that may start a garbage collection, which may free fake tensors.
  template <typename Use>
  auto withAllocator(const Use& use) {
    const Locked lock{LockRank::kDeviceMemory};
    followGpu();
    return use(*allocator_);
  }

  // The same for an allocator that may be of earlier fake devices. Does nothing before the first allocation.
  template <typename Use>
  void withEarlierAllocator(const Use& use) {
    const Locked lock{LockRank::kDeviceMemory};
    if (allocator_) {
      use(*allocator_);
    }
  }

  // Keeps the last `max_entries` actions, or stops recording.
  void recordHistory(bool enabled, std::size_t max_entries, HistoryStacks stacks);
  bool isHistoryRecorded() const;
  bool hasAllocations() const;
  std::vector<TraceEntry> history();

  // Returns the stack that allocated the block at an address, or null. Call it in `withAllocator()`.
  std::shared_ptr<const StackTrace> stackOf(std::uintptr_t address) const;

  // Adds all live allocations to `timeline`.
  void reportExisting(Timeline& timeline);

 private:
  void followGpu();
  void freeLocked(Allocation* allocation) noexcept;
  void forgetWorkspacesIfAlone();
  void forgetWorkspacesLocked();
  std::size_t takeBlock(std::size_t bytes);
  void returnBlock(std::size_t size) noexcept;
  void releaseBlock(std::size_t size) noexcept;
  bool isPinned() const noexcept;
  void observe();
  std::shared_ptr<const StackTrace> stackToRecord(HistoryStacks least) const;
  AllocationRecord recordOf(const Allocation& allocation, const AllocationCause& cause) const;
  std::size_t reserved() const;
  [[noreturn]] void raiseOutOfMemory(std::size_t bytes);

  const c10::Device device_;
  std::optional<CachingAllocator> allocator_;
  std::uint64_t generation_ = 0;  // of the fake GPU that the allocator belongs to
  // For pinned memory: the sizes of free blocks by the logarithm of the size, as in ATen's `CachingHostAllocatorImpl`.
  std::map<unsigned, std::vector<std::size_t>> free_blocks_;
  HostStats host_stats_;
  std::list<Allocation> allocations_;  // the live ones, the last one first
  // Key: the workspace, whether it is for backward passes, the stream.
  std::map<std::tuple<WorkspaceNumber, bool, c10::StreamId>, Allocation*> workspaces_;
  std::size_t max_history_ = 0;
  std::deque<TraceEntry> history_;
  std::atomic<HistoryStacks> history_stacks_{HistoryStacks::kNone};
  std::shared_ptr<const StackTrace> stack_;                                       // of the current action
  std::unordered_map<std::uintptr_t, std::shared_ptr<const StackTrace>> stacks_;  // of allocated blocks, by address
};

// Adds the live allocations of all devices to `timeline`.
TORCHEXT_API void reportExistingAllocations(Timeline& timeline);

}  // namespace torchext
