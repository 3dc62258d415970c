#include "kernel_threads.h"

#include <atomic>
#include <exception>
#include <system_error>
#include <thread>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include "interpreter.h"

// Functions of the OpenMP library that PyTorch loads, if it has one. Those of `at` also set MKL's threads in all
// threads.
extern "C" {
__attribute__((weak)) void omp_set_num_threads(int);
__attribute__((weak)) int omp_get_max_threads();
}

namespace torchext {

namespace {

std::atomic<int> forks{0};
[[maybe_unused]] const int counts_forks =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

thread_local bool is_limited = false;  // by a OneThread

}  // namespace

int countForks() noexcept {
  return forks.load(std::memory_order_relaxed);
}

OneThread::OneThread(bool is_wanted) noexcept {
  if (is_wanted && omp_set_num_threads != nullptr && omp_get_max_threads != nullptr &&
      at::get_num_threads() > 1) {  // sets the initial number of this thread
    previous_ = omp_get_max_threads();
    omp_set_num_threads(1);
    is_limited = true;
  }
}

OneThread::~OneThread() {
  if (previous_ != 0) {
    omp_set_num_threads(previous_);
    is_limited = false;
  }
}

bool hasSeveralThreads() {
  return is_limited || at::get_num_threads() > 1;
}

void callDespiteFork(c10::function_ref<void()> kernel) {
  if (countForks() == 0) {
    kernel();
    return;
  }
  const at::ThreadLocalState state;
  c10::WarningHandler* const handler = c10::WarningUtils::get_warning_handler();
  std::exception_ptr error;
  const auto run = [&] {
    const at::ThreadLocalStateGuard guard{state};
    const c10::WarningUtils::WarningHandlerGuard warnings{handler};
    try {
      kernel();
    } catch (...) {
      error = std::current_exception();
    }
  };
  bool has_thread = true;
  interpreter().withoutLock([&] {  // the kernel may be Python
    try {
      std::thread{run}.join();
    } catch (const std::system_error&) {
      has_thread = false;
    }
  });
  if (!has_thread) {
    const OneThread one_thread{true};
    kernel();
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

}  // namespace torchext
