#pragma once

// CPU memory that is reused for one computation after another.
//
// An allocator returns large blocks to the system, which must then provide them again page by page; the blocks that it
// keeps are soon fragmented by other allocations.

#include <cstddef>
#include <memory>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

namespace torchext {

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
