#include "interpreter_lock.h"

#include <atomic>

namespace torchext {

namespace {

std::atomic<InterpreterUnlocker> current_unlocker{nullptr};

}  // namespace

void setInterpreterUnlocker(InterpreterUnlocker unlocker) {
  current_unlocker = unlocker;
}

void withoutInterpreterLock(c10::function_ref<void()> run) {
  if (const InterpreterUnlocker unlocker = current_unlocker) {
    unlocker(run);
  } else {
    run();
  }
}

}  // namespace torchext
