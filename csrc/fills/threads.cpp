#include "threads.h"

#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

namespace torchext {

namespace {

// Starts threads that call `run` with 1, 2 and so on, below `count`, and returns the first index that the system has no
// thread for, or `count`.
template <typename Run>
std::int64_t startThreads(std::vector<std::thread>& threads, std::int64_t count, const Run& run) {
  for (std::int64_t index = 1; index < count; ++index) {
    try {
      threads.emplace_back(run, index);
    } catch (const std::system_error&) {
      return index;
    }
  }
  return count;
}

}  // namespace

// Threads of our own, because those of `at::parallel_for()` are not to be had here: it is a template around a pragma of
// OpenMP's, which is ignored in what is compiled without it. New threads are alive in a forked process as well, where a
// pool has lost its own.
void runAtOnce(std::int64_t count, c10::function_ref<void(std::int64_t index)> task) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
  const auto run = [&](std::int64_t index) {
    try {
      task(index);
    } catch (...) {
      errors[static_cast<std::size_t>(index)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(count));
  const std::int64_t started = startThreads(threads, count, run);
  run(0);
  for (std::int64_t index = started; index < count; ++index) {
    run(index);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) {
      std::rethrow_exception(error);
    }
  }
}

}  // namespace torchext
