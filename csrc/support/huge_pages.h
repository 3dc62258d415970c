#pragma once

#include <cstddef>

namespace torchext {

// Asks the system to back `nbytes` bytes at `data`, which nobody has touched yet, with huge pages.
// Writing fresh memory costs more than computing what is written, as long as the system is asked for each 4 KiB of it.
// Does nothing for less than half of a huge page, and where there are none.
void preferHugePages(void* data, std::size_t nbytes) noexcept;

}  // namespace torchext
