#pragma once

// NOTE [The order of locks]
//
// All locks of this library are in one table, `LockRank`, in the order in which a thread may take them: a thread that
// holds one takes only later ones, so threads cannot deadlock in a circle. No other code makes a mutex. A new lock is a
// row of the table and a name in `kNames` in locks.cpp, taken with `Locked{LockRank::kRow}`. That provides:
//
//   * The locks survive a fork. Threads do not, but the locks that they hold do: a child that inherits a lock held by a
//     thread of its parent waits for it forever, and the workers of a DataLoader are forked. So a process that forks
//     takes all locks first, in their order, and releases them in the parent and in the child.
//   * `kInterpreter` stands for the interpreter's own lock. Kernels written in Python may run under the locks before
//     it, so a thread that waits for one of these gives up the interpreter's lock. Code that holds a lock after it
//     never needs the interpreter, so threads that hold the interpreter's lock may wait for those.
//   * With the environment variable TORCHEXT_CHECK_LOCKS=1, which our tests set, a thread that breaks the order ends
//     the process with a message that names both locks.
//
// Mutexes inside PyTorch (generators, dispatcher) are not part of the table.

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include <c10/macros/Macros.h>
#include <torchext/macros.h>

namespace torchext {

// A thread may take a lock again that it holds, for the ranks up to `kPatches`.
enum class LockRank : std::uint8_t {
  kReplay,          // Folding a value into a constant, and everything that must not run at the same time.
  kDraws,           // Moving a generator past the numbers that a recorded operator draws.
  kPatches,         // Replacing functions of PyTorch (in Python: torchext/internals/patching.py).
  kKeys,            // Taking dispatch keys.
  kForeignKernels,  // The kernels of another owner of the `Fake` key.
  kPolicies,        // Registered autocast policies.
  kInterpreter,     // The interpreter's own lock, not in this table: see the note.
  kMetadataCache,   // Cached calls.
  kRefusals,        // Scaled calls that passed the check.
  kMarks,           // Marks that tensors share.
  kSharedCopies,    // Copies of small tensors that recordings share.
  kJumps,           // Cached jumps of MT19937.
  kGenerators,      // The list of the default generators of fake CUDA devices.
  kNamedCuda,       // How many blocks let the program name CUDA devices.
  kRecycled,        // Recycled memory.
  kRealMemory,      // Real allocations that a tracker counts.
  kDeviceMemory,    // Simulated allocators.
  kTimelines,       // The events that trackers have collected.
  kGpus,            // Descriptions of fake GPUs.
  kObserver,        // Whether PyTorch reports the nodes of a backward pass.
  kStorages,        // The state of each fake storage.
  kCount
};

// Returns the name of a rank, as in "storages".
TORCHEXT_API const char* nameOf(LockRank rank);

// Returns all ranks except the interpreter's, in their order.
TORCHEXT_API std::vector<LockRank> allLocks();

// Returns true if threads may wait for the interpreter while they hold the lock.
constexpr bool isOutsideOfInterpreter(LockRank rank) noexcept {
  return rank < LockRank::kInterpreter;
}

// Returns true for locks that each call on fakes takes, and that threads hold for less than a microsecond. They are
// flags, and threads that wait for one yield. A thread that holds one takes no other lock.
constexpr bool isBrief(LockRank rank) noexcept {
  return rank == LockRank::kMetadataCache || rank == LockRank::kStorages;
}

// The flags of brief locks.
TORCHEXT_API extern std::array<std::atomic<bool>, static_cast<std::size_t>(LockRank::kCount)> brief_locks;

// Not zero if threads must record which brief locks they hold: locks are checked, or a process forks.
TORCHEXT_API extern std::atomic<int> brief_locks_recorded;

// Take and release a lock. Prefer `Locked`.
TORCHEXT_API void acquire(LockRank rank) noexcept;
TORCHEXT_API bool tryToAcquire(LockRank rank) noexcept;
TORCHEXT_API void release(LockRank rank) noexcept;

// Returns true if this thread holds the lock, and took it by `acquire()` or `tryToAcquire()`.
TORCHEXT_API bool isHeld(LockRank rank) noexcept;

// Holds a lock as long as it lives.
class Locked {
 public:
  explicit Locked(LockRank rank) noexcept : rank_{rank}, is_unrecorded_{tryUnrecorded(rank)} {
    if (!is_unrecorded_) {
      acquire(rank_);
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(Locked);
  ~Locked() {
    if (is_unrecorded_) {
      flagOf(rank_).store(false, std::memory_order_release);
    } else {
      release(rank_);
    }
  }

 private:
  static std::atomic<bool>& flagOf(LockRank rank) noexcept {
    return brief_locks[static_cast<std::size_t>(rank)];
  }

  static bool tryUnrecorded(LockRank rank) noexcept {
    return isBrief(rank) && brief_locks_recorded.load(std::memory_order_relaxed) == 0 &&
           !flagOf(rank).exchange(true, std::memory_order_acquire);
  }

  const LockRank rank_;
  const bool is_unrecorded_;
};

// The next two functions do nothing unless locks are checked. They end the process if the check fails.

// Call it before a thread waits for the interpreter: the thread must hold none of the later locks.
void checkMayNeedInterpreter() noexcept;

// Call it before reading data that `rank` guards.
TORCHEXT_API void checkHolds(LockRank rank) noexcept;

// Arranges that a fork of the process takes all locks. Call it once.
void surviveForks();

// Take and release the locks before `kInterpreter`; waiting gives up the interpreter's lock. For interpreters that run
// hooks before a fork takes their own locks (in Python, the import lock), and after the fork.
TORCHEXT_API void acquireOuterLocks() noexcept;
TORCHEXT_API void releaseOuterLocks() noexcept;

}  // namespace torchext
