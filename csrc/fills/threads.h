#pragma once

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace torchext {

// Calls `task` with each index below `count` at once, with 0 on this thread. Waits for all of them, and raises the
// exception of the lowest index that has raised one. The threads round and flush as this one does, which a new thread
// takes from the one that starts it.
void runAtOnce(std::int64_t count, c10::function_ref<void(std::int64_t index)> task);

}  // namespace torchext
