#pragma once

// NOTE [Fresh memory]
//
// Pages that a process touches for the first time can cost more than computing the values that are written to them:
//
//   * The system clears each page: 2 MiB as one huge page in 0.2 to 0.4 ms, as 512 small pages in 1 to 1.5 ms, because
//     each small page is one page fault.
//   * The host of a virtual machine may have taken back memory that was free for some seconds, in units of huge pages.
//     It provides 4 KiB at a time again while the system clears a huge page, which then takes 3 to 8 ms. Small pages
//     mostly come from fragments of freed memory, which the host has not taken.
//
// The system does not report any of that. So each block of 2 MiB is measured, and the kind of page that is expected to
// be cheaper provides the next one. The estimate for the other kind falls with each block until it is tried again, but
// never below its lowest measurement, so that a kind that cannot win is not tried.

#include <cstddef>

namespace torchext {

// Provides the pages of memory that a thread is about to write from the first byte to the last. The contents stay.
// Several threads may provide parts of one huge page. Does nothing where the system cannot.
class FreshPages {
 public:
  FreshPages(void* data, std::size_t nbytes) noexcept;

  // Call it before writing the bytes before `end`. Makes a few system calls for each huge page, and none in between.
  void provide(const void* end) noexcept {
    while (next_ < end && next_ < end_) {
      provideBlock();
    }
  }

 private:
  void provideBlock() noexcept;

  char* next_;
  char* end_;
};

// Advises the system to back the untouched `nbytes` bytes at `data` with huge pages, unless small ones are expected to
// cost less. Does nothing for less than half a huge page, or where the system has no huge pages. Thread-safe; one
// system call.
void preferHugePages(void* data, std::size_t nbytes) noexcept;

// Does the same only for the huge pages that lie entirely within the `nbytes` bytes. A page at an edge would occupy all
// of its 2 MiB once any byte of it is written; without them the process never uses more memory than requested.
void preferHugePagesWithin(void* data, std::size_t nbytes) noexcept;

}  // namespace torchext
