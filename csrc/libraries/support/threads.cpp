#include "threads.h"

#include <chrono>
#include <future>
#include <system_error>
#include <vector>

#include "sizes.h"

namespace torchext {

namespace {

// Calls `task` on a new thread, or in `wait()` if the system cannot start one.
std::future<void> started(const c10::function_ref<void(std::int64_t index)>& task, std::int64_t index) {
  const auto run = [&task, index] { task(index); };
  try {
    return std::async(std::launch::async, run);
  } catch (const std::system_error&) {
    return std::async(std::launch::deferred, run);
  }
}

}  // namespace

// Starts its own threads because `at::parallel_for()` is serial here: it is a template around an OpenMP pragma, which
// is ignored in code compiled without OpenMP. New threads also work in a forked process, where a thread pool has lost
// its threads.
void runAtOnce(std::int64_t count, c10::function_ref<void(std::int64_t index)> task) {
  std::vector<std::future<void>> calls;
  calls.push_back(std::async(std::launch::deferred, [&task] { task(0); }));
  while (toSigned(calls.size()) < count) {
    calls.push_back(started(task, toSigned(calls.size())));
  }
  for (const std::future<void>& call : calls) {
    if (call.wait_for(std::chrono::seconds{0}) == std::future_status::deferred) {
      call.wait();  // calls it on this thread
    }
  }
  for (const std::future<void>& call : calls) {
    call.wait();
  }
  for (std::future<void>& call : calls) {
    call.get();
  }
}

}  // namespace torchext
