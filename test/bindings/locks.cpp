#include "../../csrc/libraries/support/locks.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "bindings.h"

namespace torchext::python {

namespace {

LockRank rankOf(const std::string& name) {
  const std::vector<LockRank> all = allLocks();
  return *std::find_if(all.begin(), all.end(), [&name](LockRank rank) { return nameOf(rank) == name; });
}

std::vector<std::string> lockNames() {
  std::vector<std::string> names;
  for (const LockRank rank : allLocks()) {
    names.emplace_back(nameOf(rank));
  }
  return names;
}

// Holds any lock, without the GIL.
void holdLock(const std::string& name, double seconds) {
  const Locked lock{rankOf(name)};
  std::this_thread::sleep_for(std::chrono::duration<double>{seconds});
}

// Returns true if another thread holds the lock.
bool isLockHeld(const std::string& name) {
  const LockRank rank = rankOf(name);
  const bool is_free = tryToAcquire(rank);
  if (is_free) {
    release(rank);
  }
  return !is_free;
}

}  // namespace

void bindLocks(pybind11::module_& module) {
  module.def("lock_names", &lockNames);
  bind(module, "hold_lock", holdLock);
  bind(module, "is_lock_held", isLockHeld);
}

}  // namespace torchext::python
