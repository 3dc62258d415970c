#pragma once

// Memory on the CPU that is used again and again, for those who compute one thing after another.
//
// An allocator gives large memory back to the system, which then has to be asked for it anew, page by page, and what it
// keeps is soon broken into pieces by what is allocated in between.

#include <cstddef>
#include <memory>

#include <c10/core/Storage.h>
#include <torchext/macros.h>

namespace torchext {

// Keeps what is freed of the memory that it has given. Any thread may free it, also after the last reference to this.
// `slack` is how much freed memory of other kinds, in bytes, the process may keep beyond that: `trim()`.
class TORCHEXT_API RecycledMemory : public std::enable_shared_from_this<RecycledMemory> {
 public:
  static std::shared_ptr<RecycledMemory> make(std::size_t slack);
  C10_DISABLE_COPY_AND_ASSIGN(RecycledMemory);
  ~RecycledMemory();

  // A storage of `nbytes` bytes with arbitrary contents, which cannot be resized.
  c10::Storage makeStorage(std::size_t nbytes);

  // Gives memory back to the system that the allocator of C keeps, if it is more than the slack. Between what is
  // computed there are small allocations, which stay, so that what is freed is not used again and the process grows.
  void trim() const noexcept;

  // The one of the innermost `RecyclingGuard` on this thread, or null.
  static RecycledMemory* current() noexcept;

 private:
  struct Block;
  struct InUse;
  struct State;

  explicit RecycledMemory(std::size_t slack);
  static void giveBack(void* in_use);

  std::unique_ptr<State> state_;
};

// While it lives, large memory that values are computed into on this thread is taken from `memory`.
class TORCHEXT_API RecyclingGuard {
 public:
  explicit RecyclingGuard(RecycledMemory& memory) noexcept;
  C10_DISABLE_COPY_AND_ASSIGN(RecyclingGuard);
  ~RecyclingGuard();

 private:
  RecycledMemory* before_;
};

}  // namespace torchext
