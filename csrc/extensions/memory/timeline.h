#pragma once

// The data of `torchext.memory.track_memory()`: each allocation of the tracked devices, and the order of all
// allocations and frees.

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/Stream.h>

#include <torchext/macros.h>

namespace torchext {

// The use of an allocation. In the order of precedence: an earlier category never replaces a later one.
enum class MemoryCategory : std::int64_t {
  kTemporary,      // results that are not saved for the backward pass
  kActivation,     // made before a backward pass, and alive when it begins
  kInput,          // made outside of modules, backward passes and optimizers
  kCommunication,  // made by collectives, or for them
  kWorkspace,      // made inside of kernels
  kGradient,
  kOptimizerState,
  kParameter,
  kCache,  // carried from one forward pass to the next: NOTE [Categories of memory]
};
constexpr std::size_t kNumMemoryCategories = 9;
using BytesByCategory = std::array<std::size_t, kNumMemoryCategories>;

// The part of a training step that the thread was running.
enum class MemoryPhase : std::int64_t { kForward, kBackward, kOptimizer, kOther };

// A call of a module that is not inside another module's call.
struct ForwardPass {
  std::uint64_t root = 0;    // the number of the module
  std::uint64_t number = 0;  // of the pass, in the order of time; 0 outside of forward passes
};

// A row of `Allocations` (torchext/memory/timeline.py), which reads all members as signed integers of 64 bits.
struct AllocationRecord {
  std::int64_t place;  // the index of a CUDA device, -1 for other devices, -2 for pinned memory
  std::size_t bytes;   // as requested
  std::size_t size;    // in the allocator
  const char* op;      // the operator that allocated it, or null
  std::int64_t scope;  // of the thread, see MemoryScope; -1 for none
  std::int64_t line;   // of the program, as the number of a text; -1 if not traced
  MemoryPhase phase;
  MemoryCategory category;
  std::uintptr_t address;
  c10::StreamId stream;
  std::int64_t born = -1;  // the number of the event; -1 if allocated before the timeline began
  std::int64_t died = -1;  // the number of the event; -1 while alive
};
static_assert(sizeof(AllocationRecord) == 12 * sizeof(std::int64_t));

// A row of `Events` there.
struct MemoryEvent {
  std::int64_t change;    // `n` allocates the allocation of that number, `~n` frees it
  std::int64_t reserved;  // the bytes of its device, after the event
  std::int64_t time_ns;   // of a steady clock
};

// The recorded allocations and events, and the texts that they refer to.
struct TimelineData {
  std::vector<AllocationRecord> allocations;
  std::vector<MemoryEvent> events;
  std::vector<std::string> texts;
};

// An allocation in a timeline, which need not be the current one.
struct AllocationNumber {
  std::int32_t number = -1;
  std::uint64_t timeline = 0;
};

// The events between the opening of the first tracker and the closing of the last. All functions are thread-safe.
// Python computes reports from a copy of the data: torchext/memory/timeline.py.
class TORCHEXT_API Timeline {
 public:
  Timeline();

  // Adds an allocation and its event. `sequence_nr` is that of the autograd node that is running, or -1.
  AllocationNumber addBirth(AllocationRecord record, std::int64_t sequence_nr, std::size_t reserved);
  // Adds an allocation from before the tracker was opened.
  AllocationNumber addExisting(const AllocationRecord& record);
  void addDeath(AllocationNumber allocation, std::size_t reserved);

  void setCategory(AllocationNumber allocation, MemoryCategory category);

  // Call it when a backward pass begins: temporaries of forward passes that are alive now become activations.
  void markActivations();

  // Returns the number of a text that records refer to.
  std::int32_t numberOf(const std::string& text);

  std::int64_t countEvents() const;

  // Returns a number that grows with each change of the data.
  std::int64_t version() const;

  TimelineData data() const;

  // Returns the bytes that are allocated in `place` now, by category.
  BytesByCategory liveBytes(std::int64_t place) const;

  // Records that autograd nodes from this sequence number on are created in `scope`. Backward passes look it up.
  void addBoundary(std::uint64_t sequence_nr, std::int32_t scope);

 private:
  AllocationRecord* find(AllocationNumber allocation);
  AllocationNumber add(const AllocationRecord& record);
  std::int32_t scopeOfNode(std::int64_t sequence_nr) const;

  const std::uint64_t number_;
  TimelineData data_;
  std::int64_t version_ = 0;
  std::unordered_map<std::string, std::int32_t> numbers_;
  std::map<std::uint64_t, std::int32_t> boundaries_;
};

// Starts the collection, or joins it if another tracker is open.
TORCHEXT_API std::shared_ptr<Timeline> openTimeline();

// Closes one tracker. The last one ends the collection.
TORCHEXT_API void closeTimeline();

// Returns true while a tracker is open. Costs one relaxed load.
TORCHEXT_API bool isTracking() noexcept;

// Returns the timeline of the open trackers, or null.
TORCHEXT_API std::shared_ptr<Timeline> currentTimeline();

// The scope of this thread, for the records of its allocations.
struct ThreadScope {
  std::int32_t scope = -1;
  MemoryPhase phase = MemoryPhase::kOther;
  bool traces_lines = false;
  bool is_in_backward = false;  // entered inside a backward pass, which recomputes activations
  ForwardPass pass;
};
TORCHEXT_API const ThreadScope& threadScope() noexcept;

// Sets the scope and returns the previous one. `root` is the number of the module if this begins a forward pass.
TORCHEXT_API ThreadScope setThreadScope(std::int32_t scope,
                                        MemoryPhase phase,
                                        bool traces_lines,
                                        std::uint64_t root = 0);

}  // namespace torchext
