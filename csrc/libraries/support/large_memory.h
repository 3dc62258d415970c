#pragma once

// CPU memory for large results.
//
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
#include <memory>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

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

// Memory that is reused for one computation after another. An allocator returns large blocks to the system, which must
// then provide them again page by page; the blocks that it keeps are soon fragmented by other allocations.
//
// Keeps the freed blocks that it has handed out. Any thread may free them, also after the last reference to this
// object. `slack` is the number of bytes of other freed memory that the process may keep: `trim()`.
class TORCHEXT_API RecycledMemory : public std::enable_shared_from_this<RecycledMemory> {
 public:
  static std::shared_ptr<RecycledMemory> make(std::size_t slack);
  C10_DISABLE_COPY_AND_ASSIGN(RecycledMemory);
  ~RecycledMemory();

  // Makes a storage of `nbytes` bytes with arbitrary contents. It cannot be resized.
  c10::Storage makeStorage(std::size_t nbytes);

  // Calls `compute`. Large results that it computes on this thread are allocated from this memory.
  void serve(c10::function_ref<void()> compute);

  // Returns freed memory that the C allocator keeps to the system, if it exceeds the slack. Small allocations between
  // the large ones prevent their reuse, so without this the process grows.
  void trim() const noexcept;

 private:
  struct Block;
  struct InUse;

  explicit RecycledMemory(std::size_t slack);
  static void giveBack(void* in_use);

  std::vector<Block> free_;  // blocks that are not in use
  const std::size_t slack_;
};

// Returns CPU memory for a large result: of the innermost `serve()` on this thread, or else new and on huge pages.
c10::Storage makeLargeStorage(std::size_t nbytes);

}  // namespace torchext
