#pragma once

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace torchext {

// Calls `task` with each index below `count` concurrently, with 0 on this thread. Waits for all, and rethrows the
// exception of the lowest failed index. The threads inherit the rounding and denormal modes of this thread.
void runAtOnce(std::int64_t count, c10::function_ref<void(std::int64_t index)> task);

}  // namespace torchext
