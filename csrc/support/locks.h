#pragma once

// NOTE [The order of locks]
//
// All locks of this library are in one table, `LockRank`, in the order in which a thread may take them: a thread that
// holds one takes only those that come after it, so that threads cannot wait for each other in a circle. Code never
// makes a mutex of its own. It adds a row to the table, its name to `kNames` in locks.cpp, and takes
// `Locked{LockRank::kRow}`, which is all that a new lock needs:
//
//   * The locks survive a fork. Threads do not, but what they hold does: a child that inherits a lock held by a thread
//     of its parent waits for it forever, and the workers of a DataLoader are forked. So a process that forks takes all
//     locks first, in their order, and releases them in the parent and in the child.
//   * `kInterpreter` stands for the interpreter's own lock. Kernels written in Python may run under the locks that come
//     before it, so waiting for one of these gives up the interpreter's lock. Code that holds one of those that come
//     after it never needs the interpreter, so threads that hold the interpreter's lock may wait for them.
//   * With the environment variable TORCHEXT_CHECK_LOCKS=1, as in our tests, a thread that breaks the order ends the
//     process with a message that names both locks.
//
// The generators and the dispatcher of PyTorch have mutexes of their own, which are no concern of the table.

#include <cstdint>
#include <vector>

#include <torchext/macros.h>

namespace torchext {

// A thread may take again what it holds, for the ranks up to `kPatches`.
enum class LockRank : std::uint8_t {
  kReplay,          // Folding a value into a constant, and everything that must not see that happen.
  kDraws,           // Moving a generator past the numbers that a recorded operator draws.
  kPatches,         // Replacing functions of PyTorch (Python: torchext/tools/patching.py).
  kKeys,            // Taking dispatch keys.
  kForeignKernels,  // The kernels of another owner of the `Fake` key.
  kPolicies,        // Registered autocast policies.
  kInterpreter,     // Not a lock of ours: see the note.
  kMetadataCache,   // Remembered calls.
  kRefusals,        // Scaled calls that have passed.
  kMarks,           // Marks that tensors share.
  kSharedCopies,    // Copies of small tensors that recordings share.
  kJumps,           // Remembered jumps of MT19937.
  kGenerators,      // The list of the default generators of fake CUDA devices.
  kNamedCuda,       // How many blocks let the program name CUDA devices.
  kStorages,        // What is known of each fake storage.
  kRecycled,        // Memory that is used again.
  kRealMemory,      // Real allocations that a tracker counts.
  kDeviceMemory,    // Simulated allocators.
  kTimelines,       // What trackers have collected.
  kGpus,            // Descriptions of fake GPUs.
  kObserver,        // Whether PyTorch shows us the nodes of a backward pass.
  kCount
};

// The name of a rank, as in "storages".
TORCHEXT_API const char* nameOf(LockRank rank);

// All ranks that are locks of ours, in their order.
TORCHEXT_API std::vector<LockRank> allLocks();

// Returns true if threads may wait for the interpreter while they hold the lock.
constexpr bool isOutsideOfInterpreter(LockRank rank) noexcept {
  return rank < LockRank::kInterpreter;
}

// Take and release a lock. Prefer `Locked`.
TORCHEXT_API void acquire(LockRank rank) noexcept;
TORCHEXT_API bool tryToAcquire(LockRank rank) noexcept;
TORCHEXT_API void release(LockRank rank) noexcept;

// Returns true if this thread holds the lock.
TORCHEXT_API bool isHeld(LockRank rank) noexcept;

// Holds a lock as long as it lives.
class Locked {
 public:
  explicit Locked(LockRank rank) noexcept : rank_{rank} {
    acquire(rank_);
  }
  C10_DISABLE_COPY_AND_ASSIGN(Locked);
  ~Locked() {
    release(rank_);
  }

 private:
  const LockRank rank_;
};

// These two do nothing unless locks are checked, and end the process where an assumption does not hold.

// To be called before a thread waits for the interpreter: it must hold none of the locks that come after it.
void checkMayNeedInterpreter() noexcept;

// To be called where what is read is guarded by `rank`.
void checkHolds(LockRank rank) noexcept;

// Has all locks taken when the process forks. Once.
void surviveForks();

// For interpreters that call something before they take locks of their own for a fork, as Python its import lock, and
// after the fork: take and release the locks that come before `kInterpreter`, which is given up while this waits.
TORCHEXT_API void acquireOuterLocks() noexcept;
TORCHEXT_API void releaseOuterLocks() noexcept;

}  // namespace torchext
