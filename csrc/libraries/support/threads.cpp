#include "threads.h"

#include <future>
#include <vector>

namespace torchext {

// Starts its own threads because `at::parallel_for()` is serial here: it is a template around an OpenMP pragma, which
// is ignored in code compiled without OpenMP. New threads also work in a forked process, where a thread pool has lost
// its threads. If the system cannot start one, `std::async()` defers the call, and `get()` makes it on this thread.
void runAtOnce(std::int64_t count, c10::function_ref<void(std::int64_t index)> task) {
  std::vector<std::future<void>> calls;  // their destructors wait
  for (std::int64_t index = 1; index < count; ++index) {
    calls.push_back(std::async(std::launch::async | std::launch::deferred, task, index));
  }
  task(0);
  for (std::future<void>& call : calls) {
    call.get();
  }
}

}  // namespace torchext
