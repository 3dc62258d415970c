#pragma once

#include <cstddef>

namespace torchext {

// Advises the system to back the untouched `nbytes` bytes at `data` with huge pages. Without them, the page faults for
// each 4 KiB cost more than computing the values that are written. Does nothing for less than half a huge page, or
// where the system has no huge pages. Thread-safe; one system call.
void preferHugePages(void* data, std::size_t nbytes) noexcept;

// Does the same only for the huge pages that lie entirely within the `nbytes` bytes. A page at an edge would occupy all
// of its 2 MiB once any byte of it is written; without them the process never uses more memory than requested.
void preferHugePagesWithin(void* data, std::size_t nbytes) noexcept;

}  // namespace torchext
