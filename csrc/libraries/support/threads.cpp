#include "threads.h"

#include <cstddef>
#include <exception>
#include <system_error>
#include <thread>
#include <vector>

#include "sizes.h"

namespace torchext {

namespace {

// Starts threads that call `run` with 1, 2, ..., below `count`. Returns the first index for which the system could not
// start a thread, or `count`.
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

// Starts its own threads because `at::parallel_for()` is serial here: it is a template around an OpenMP pragma, which
// is ignored in code compiled without OpenMP. New threads also work in a forked process, where a thread pool has lost
// its threads.
void runAtOnce(std::int64_t count, c10::function_ref<void(std::int64_t index)> task) {
  std::vector<std::exception_ptr> errors(toSize(count));
  const auto run = [&](std::int64_t index) {
    try {
      task(index);
    } catch (...) {
      errors[toSize(index)] = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(toSize(count));
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
