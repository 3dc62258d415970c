#pragma once

// A thread that waits for one of the core's locks must not hold the interpreter's: the thread that holds ours may be
// running a kernel written in Python.

#include <mutex>

#include "interpreter.h"

namespace torchext {

// Like std::lock_guard, but waits without the interpreter's lock.
template <typename Mutex>
class InterpreterAwareLock {
 public:
  explicit InterpreterAwareLock(Mutex& mutex) : mutex_{mutex} {
    if (!mutex_.try_lock()) {
      interpreter().withoutLock([this] { mutex_.lock(); });
    }
  }
  InterpreterAwareLock(const InterpreterAwareLock&) = delete;
  InterpreterAwareLock& operator=(const InterpreterAwareLock&) = delete;
  InterpreterAwareLock(InterpreterAwareLock&&) = delete;
  InterpreterAwareLock& operator=(InterpreterAwareLock&&) = delete;
  ~InterpreterAwareLock() {
    mutex_.unlock();
  }

 private:
  Mutex& mutex_;
};

}  // namespace torchext
