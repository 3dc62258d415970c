#pragma once

#include <cstddef>

namespace torchext {

// Asks the system to back `nbytes` bytes at `data`, which nobody has touched yet, with huge pages.
// Writing fresh memory costs more than computing what is written, as long as the system is asked for each 4 KiB of it.
// Does nothing for less than half of a huge page, and where there are none. Any thread may call it; it is one system
// call.
void preferHugePages(void* data, std::size_t nbytes) noexcept;

// Does the same for those huge pages only that lie within the `nbytes` bytes, so that the process never takes more
// memory than that for them. A page at an edge is backed as a whole, which is 2 MiB, if any byte of it is written.
void preferHugePagesWithin(void* data, std::size_t nbytes) noexcept;

}  // namespace torchext
