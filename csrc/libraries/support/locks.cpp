#include "locks.h"

#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <thread>

#include <pthread.h>

#include "interpreter.h"

namespace torchext {

std::array<std::atomic<bool>, static_cast<std::size_t>(LockRank::kCount)> brief_locks{};

std::atomic<int> brief_locks_recorded{1};  // until surviveForks()

namespace {

constexpr auto kNumRanks = static_cast<std::size_t>(LockRank::kCount);

constexpr std::array<const char*, kNumRanks> kNames{
    "replay",      "draws",      "patches",         "keys",        "foreign kernels", "policies",
    "interpreter", "cache",      "refusals",        "marks",       "copies",          "jumps",
    "generators",  "named cuda", "recycled memory", "real memory", "device memory",   "timelines",
    "gpus",        "observer",   "storages"};

static_assert(kNames.back() != nullptr, "A lock has no name.");

// The locks that this thread holds. Trivially destructible, so that locks can be taken while a thread ends.
struct Held {
  std::uint32_t ranks = 0;
  std::array<std::uint16_t, kNumRanks> counts{};
  // A thread that forks holds all locks, but only the ones that it held before guard a change in progress. So functions
  // that the program registered in Python to run at a fork may take the others again.
  std::uint16_t forks = 0;
};
static_assert(kNumRanks <= 32);

thread_local Held held;

// Leaked: threads take locks until the process ends.
std::mutex& mutexOf(LockRank rank) {
  static auto* all = new std::array<std::mutex, kNumRanks>;
  return (*all)[static_cast<std::size_t>(rank)];
}

bool tryMutex(LockRank rank) noexcept {
  return isBrief(rank) ? !brief_locks[static_cast<std::size_t>(rank)].exchange(true, std::memory_order_acquire)
                       : mutexOf(rank).try_lock();
}

void lockMutex(LockRank rank) noexcept {
  if (isBrief(rank)) {
    while (!tryMutex(rank)) {
      std::this_thread::yield();
    }
  } else if (isOutsideOfInterpreter(rank)) {
    interpreter().withoutLock([rank] { mutexOf(rank).lock(); });
  } else {
    mutexOf(rank).lock();
  }
}

void unlockMutex(LockRank rank) noexcept {
  if (isBrief(rank)) {
    brief_locks[static_cast<std::size_t>(rank)].store(false, std::memory_order_release);
  } else {
    mutexOf(rank).unlock();
  }
}

constexpr std::uint32_t bitOf(LockRank rank) {
  return std::uint32_t{1} << static_cast<unsigned>(rank);
}

bool areLocksChecked() noexcept {
  static const bool are_checked = [] {
    const char* value = std::getenv("TORCHEXT_CHECK_LOCKS");
    return value != nullptr && std::string_view{value} == "1";
  }();
  return are_checked;
}

[[noreturn]] void endProcess(const char* what, LockRank rank, const char* held_one) noexcept {
  std::fprintf(
      stderr,
      "torchext: %s the lock \"%s\"%s%s%s: see the NOTE [The order of locks] in csrc/libraries/support/locks.h.\n",
      what, nameOf(rank), held_one == nullptr ? "" : " while it holds \"", held_one == nullptr ? "" : held_one,
      held_one == nullptr ? "" : "\"");
  std::abort();
}

// Returns the last lock, in the order, that this thread holds.
LockRank lastHeld() {
  auto rank = kNumRanks - 1;
  while ((held.ranks & bitOf(static_cast<LockRank>(rank))) == 0) {
    --rank;
  }
  return static_cast<LockRank>(rank);
}

// A thread that forks holds all locks.
bool holdsBrief() noexcept {
  constexpr std::uint32_t kBrief = bitOf(LockRank::kMetadataCache) | bitOf(LockRank::kStorages);
  return (held.ranks & kBrief) != 0 && held.forks == 0;
}

void checkOrder(LockRank rank) noexcept {
  if ((held.ranks >= bitOf(rank) || holdsBrief()) && areLocksChecked()) {
    endProcess("a thread waits for", rank, nameOf(lastHeld()));
  }
}

// Takes the lock again if this thread holds it. Taking a lock again that guards a change in progress would be a
// deadlock.
bool acquireAgain(LockRank rank) noexcept {
  auto& count = held.counts[static_cast<std::size_t>(rank)];
  if (count == 0) {
    return false;
  }
  if (rank > LockRank::kPatches && held.forks == 0) {
    endProcess("a thread takes again", rank, nullptr);
  }
  ++count;
  return true;
}

void noteAcquired(LockRank rank) noexcept {
  held.counts[static_cast<std::size_t>(rank)] = 1;
  held.ranks |= bitOf(rank);
}

template <typename Visit>
void forEachLock(LockRank begin, LockRank end, const Visit& visit) {
  for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i) {
    if (const auto rank = static_cast<LockRank>(i); rank != LockRank::kInterpreter) {
      visit(rank);
    }
  }
}

void acquireForFork(LockRank end) noexcept {
  ++held.forks;
  ++brief_locks_recorded;
  forEachLock(LockRank{}, end, acquire);
}

void releaseAfterFork(LockRank end) noexcept {
  forEachLock(LockRank{}, end, release);
  --brief_locks_recorded;
  --held.forks;
}

}  // namespace

const char* nameOf(LockRank rank) {
  return kNames.at(static_cast<std::size_t>(rank));
}

std::vector<LockRank> allLocks() {
  std::vector<LockRank> all;
  forEachLock(LockRank{}, LockRank::kCount, [&all](LockRank rank) { all.push_back(rank); });
  return all;
}

void acquire(LockRank rank) noexcept {
  if (acquireAgain(rank)) {
    return;
  }
  checkOrder(rank);
  if (!tryMutex(rank)) {
    lockMutex(rank);
  }
  noteAcquired(rank);
}

bool tryToAcquire(LockRank rank) noexcept {
  if (acquireAgain(rank)) {
    return true;
  }
  if (!tryMutex(rank)) {
    return false;
  }
  noteAcquired(rank);
  return true;
}

bool isHeld(LockRank rank) noexcept {
  return held.counts[static_cast<std::size_t>(rank)] != 0;
}

void release(LockRank rank) noexcept {
  auto& count = held.counts[static_cast<std::size_t>(rank)];
  if (--count == 0) {
    held.ranks &= ~bitOf(rank);
    unlockMutex(rank);
  }
}

void checkMayNeedInterpreter() noexcept {
  checkOrder(LockRank::kInterpreter);
}

void checkHolds(LockRank rank) noexcept {
  if (held.counts[static_cast<std::size_t>(rank)] == 0 && areLocksChecked()) {
    endProcess("a thread reads data that is guarded by, but does not hold,", rank, nullptr);
  }
}

void surviveForks() {
  brief_locks_recorded -= areLocksChecked() ? 0 : 1;
  pthread_atfork([] { acquireForFork(LockRank::kCount); }, [] { releaseAfterFork(LockRank::kCount); },
                 [] {
                   // without the forks of threads of the parent
                   brief_locks_recorded = held.forks + (areLocksChecked() ? 1 : 0);
                   releaseAfterFork(LockRank::kCount);
                 });
}

void acquireOuterLocks() noexcept {
  acquireForFork(LockRank::kInterpreter);
}

void releaseOuterLocks() noexcept {
  releaseAfterFork(LockRank::kInterpreter);
}

}  // namespace torchext
