#pragma once

// CPU memory that is reused for one computation after another.
//
// An allocator returns large blocks to the system, which must then provide them again page by page; the blocks that it
// keeps are soon fragmented by other allocations.

#include <cstddef>
#include <memory>

#include <c10/core/Storage.h>
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

  // Returns freed memory that the C allocator keeps to the system, if it exceeds the slack. Small allocations between
  // the large ones prevent their reuse, so without this the process grows.
  void trim() const noexcept;

  // Returns the memory of the innermost `RecyclingGuard` on this thread, or null.
  static RecycledMemory* current() noexcept;

 private:
  struct Block;
  struct InUse;
  struct State;

  explicit RecycledMemory(std::size_t slack);
  static void giveBack(void* in_use);

  std::unique_ptr<State> state_;
};

// While it lives, large results that are computed on this thread are allocated from `memory`.
class TORCHEXT_API RecyclingGuard {
 public:
  explicit RecyclingGuard(RecycledMemory& memory) noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(RecyclingGuard);
  ~RecyclingGuard();

 private:
  RecycledMemory* before_;
};

// Returns CPU memory for a large result: of the innermost guard on this thread, or else new and on huge pages.
c10::Storage makeLargeStorage(std::size_t nbytes);

}  // namespace torchext
