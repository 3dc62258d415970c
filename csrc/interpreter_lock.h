#pragma once

// The core does not know Python, but a thread that waits for one of the core's locks must not hold the interpreter's:
// whoever holds ours may be running a kernel that is written in Python.

#include <mutex>

#include <c10/util/FunctionRef.h>

namespace torchext {

// Calls its argument without the interpreter's lock, if this thread holds it. Set by the bindings; null before.
using InterpreterUnlocker = void (*)(c10::function_ref<void()>);
void setInterpreterUnlocker(InterpreterUnlocker unlocker);

void withoutInterpreterLock(c10::function_ref<void()> run);

// Like std::lock_guard, but waits without the interpreter's lock.
template <typename Mutex>
class InterpreterAwareLock {
 public:
  explicit InterpreterAwareLock(Mutex& mutex) : mutex_{mutex} {
    if (!mutex_.try_lock()) {
      withoutInterpreterLock([this] { mutex_.lock(); });
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
