#pragma once

// Replaces single virtual functions of an existing object, as a subclass overrides them. Relies on the Itanium C++ ABI,
// which all compilers supported by PyTorch on Linux and macOS follow.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>

#include <c10/util/Exception.h>
#include <torchext/macros.h>

namespace torchext {

// Returns the position of a virtual member function in the table of its class (ABI, 2.3).
template <typename Method>
std::size_t slotOf(Method method) {
  struct {
    std::ptrdiff_t pointer;
    std::ptrdiff_t adjustment;
  } representation{};
  static_assert(sizeof(method) == sizeof(representation));
  std::memcpy(&representation, &method, sizeof(method));
#if defined(__aarch64__)
  const std::ptrdiff_t offset = representation.pointer;  // the "virtual" bit is in the adjustment
#else
  const std::ptrdiff_t offset = representation.pointer - 1;
#endif
  return static_cast<std::size_t>(offset) / sizeof(void*);
}

// Returns the number of function entries in the virtual table of a class: the position of the first function that a
// subclass adds.
template <typename Class>
std::size_t tableSizeOf() {
  struct Subclass : Class {
    virtual void added() = 0;
  };
  return slotOf(&Subclass::added);
}

// Returns the number of functions in the table from the size of its symbol in the library, or 0 if the symbol is not
// exported. Then the header decides: it is that of the release that runs, or the import is refused (python/module.cpp).
TORCHEXT_API std::size_t exportedTableSize(const void* table);

// A copy of the virtual table of an object's class, with replaceable entries. Must outlive the object.
template <std::size_t kCapacity>
class VirtualTable {
 public:
  // Copies the first `count` entries of the table of `object`, and the entries before them (ABI, 2.5.2). Rejects a
  // class whose number of functions differs from the header: further functions would be called past the end of the
  // copy.
  VirtualTable(const void* object, std::size_t count) {
    const Entry* table = nullptr;
    std::memcpy(static_cast<void*>(&table), object, sizeof(table));
    const std::size_t exported = exportedTableSize(table);
    TORCH_CHECK((exported == 0 || exported == count) && count <= kCapacity, "A PyTorch class has ", exported,
                " virtual functions, but ", count, " in the headers that torchext was built with.");
    std::copy_n(table - kBeforeFirst, kBeforeFirst + count, entries_.begin());
  }

  // Replaces the entry at `slot` by `function`, which takes the object as its first argument, and returns the original.
  template <typename Function>
  Function replace(std::size_t slot, Function function) {
    Entry& entry = entries_.at(kBeforeFirst + slot);
    const auto original = reinterpret_cast<Function>(entry);
    entry = reinterpret_cast<Entry>(function);
    return original;
  }

  // Gives `object` this table. Calls in progress on other threads are not affected.
  void installInto(void* object) const {
    const Entry* table = entries_.data() + kBeforeFirst;
    std::memcpy(object, static_cast<const void*>(&table), sizeof(table));
  }

 private:
  using Entry = void*;
  static constexpr std::size_t kBeforeFirst = 2;  // the offset to the top, and the type information

  std::array<Entry, kBeforeFirst + kCapacity> entries_{};
};

// Returns true if the compiler lays out virtual tables as this file assumes.
bool testVirtualTable(bool is_broken);

}  // namespace torchext
