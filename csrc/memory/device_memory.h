#pragma once

// The memory of fake devices: one simulated allocator for each fake CUDA device of the process, and plain sums for all
// other devices.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
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

#include "../support/interpreter.h"
#include "caching_allocator.h"
#include "kernels/kernel_memory.h"
#include "timeline.h"

namespace torchext {

// Some bytes on a device, held by a fake storage or by a kernel that runs.
struct Allocation {
  c10::Device device;
  std::size_t bytes;  // as requested
  Block* block;       // null on devices without an allocator
  const char* op;     // that made it, or null
  MemoryCategory category;
  ForwardPass pass = {};     // in which it was made
  bool is_presumed = false;  // the category: it is replaced by any that is known
  AllocationNumber number = {};
  Allocation* previous = nullptr;  // the neighbours in the list of its device
  Allocation* next = nullptr;
};

using StackTrace = std::vector<StackFrame>;

// Whether the history has the functions that were running.
enum class HistoryStacks : std::uint8_t { kNone, kOfAllocations, kOfAll };

// An action of the allocator, as `torch.cuda.memory._snapshot()` lists them.
struct TraceEntry {
  MemoryAction action;
  std::uintptr_t address;
  std::size_t bytes;
  c10::StreamId stream;
  std::int64_t time_us;                     // since the epoch
  std::shared_ptr<const StackTrace> stack;  // null if it is not recorded
};

// What allocates.
struct AllocationCause {
  const char* op = nullptr;       // the name of the operator, which lives as long as the process
  bool is_of_kernel = false;      // besides the results
  bool communicates = false;      // it is made by a collective, or for one
  std::int64_t sequence_nr = -1;  // of the node of autograd that is running
  std::int32_t line = -1;         // the number of the line of the program, if lines are traced
  // What the storage was for when it last had memory.
  MemoryCategory category = MemoryCategory::kTemporary;
};

// Which workspace, and for which of the threads that the program would have on a GPU.
struct WorkspaceKey {
  WorkspaceNumber number;
  bool is_for_backward;
};

// The memory of one device. Thread-safe.
class TORCHEXT_API DeviceMemory {
 public:
  // Returns that of `device`, whose index must be given.
  static DeviceMemory& of(c10::Device device);

  explicit DeviceMemory(c10::Device device);
  C10_DISABLE_COPY_AND_ASSIGN(DeviceMemory);
  ~DeviceMemory();

  // Allocates on the stream that is current on this thread. Throws c10::OutOfMemoryError.
  Allocation* allocate(std::size_t bytes, const AllocationCause& cause);
  void free(Allocation* allocation) noexcept;
  void recordStream(Allocation* allocation, c10::StreamId stream);

  // Sees that there is a workspace of at least `bytes` for the stream that is current on this thread. It is kept.
  void keepWorkspace(WorkspaceKey key, std::size_t bytes, const AllocationCause& cause);

  // The following are about CUDA devices only.
  AllocatorStats stats();
  void resetPeakStats();
  void resetAccumulatedStats();
  void emptyCache();
  void enterPool(PoolId id);
  void leavePool(PoolId id);
  void releasePool(PoolId id);
  void setFraction(double fraction);
  double fraction();

  struct DriverInfo {
    std::size_t free;
    std::size_t total;
  };
  DriverInfo driverInfo();

  // Calls `visit` with the blocks that begin segments, while nothing can be allocated or freed. So it must not make
  // Python objects: that may collect garbage, and fakes among it.
  void visitSegments(const std::function<void(const Block& first)>& visit);

  // Keeps the last `max_entries` actions, or stops to.
  void recordHistory(bool enabled, std::size_t max_entries, HistoryStacks stacks);
  std::vector<TraceEntry> history();

  // Returns where the allocated block at an address was allocated, or null. For `visitSegments()`.
  std::shared_ptr<const StackTrace> stackOf(std::uintptr_t address) const;

  // Tells `timeline` what is allocated now.
  void tellExisting(Timeline& timeline);

 private:
  void followGpu();
  void freeLocked(Allocation* allocation) noexcept;
  void forgetWorkspaces();
  std::size_t sizeOf(std::size_t bytes) const noexcept;
  bool isPinned() const noexcept;
  void observe();
  std::shared_ptr<const StackTrace> stackToRecord(HistoryStacks least) const;
  AllocationRecord recordOf(const Allocation& allocation, const AllocationCause& cause) const;
  std::size_t reserved() const;
  [[noreturn]] void raiseOutOfMemory(std::size_t bytes);

  const c10::Device device_;
  std::optional<CachingAllocator> allocator_;
  std::uint64_t generation_ = 0;  // of the fake GPU that the allocator is for
  // Of pinned memory, the free blocks by size, and the bytes of all blocks: `CachingHostAllocatorImpl` of ATen.
  std::map<std::size_t, std::size_t> free_blocks_;
  std::size_t bytes_of_blocks_ = 0;
  Allocation* first_ = nullptr;  // the list of what is allocated
  // By the workspace, whether it is for backward passes, and the stream.
  std::map<std::tuple<WorkspaceNumber, bool, c10::StreamId>, Allocation*> workspaces_;
  std::size_t max_history_ = 0;
  std::deque<TraceEntry> history_;
  std::atomic<HistoryStacks> history_stacks_{HistoryStacks::kNone};
  std::shared_ptr<const StackTrace> stack_;                                       // of the action that is going on
  std::unordered_map<std::uintptr_t, std::shared_ptr<const StackTrace>> stacks_;  // of allocated blocks, by address
};

// Tells `timeline` what is allocated on all devices.
TORCHEXT_API void tellExistingAllocations(Timeline& timeline);

}  // namespace torchext
