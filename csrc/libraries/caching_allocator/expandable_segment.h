#pragma once

#include <cstddef>
#include <cstdint>

namespace torchext {

// A range of addresses.
struct AddressRange {
  std::uintptr_t begin;
  std::size_t size;
};

// Addresses that get memory page by page, on demand: PyTorch's `expandable_segments:True`. The blocks in the segment
// record which pages have memory.
struct ExpandableSegment {
  std::uintptr_t begin;   // a multiple of `page_size`
  std::size_t size;       // likewise
  std::size_t page_size;  // in bytes

  std::size_t roundedUp(std::size_t bytes) const noexcept {
    return (bytes + page_size - 1) / page_size * page_size;
  }

  // Returns the whole pages inside `range`, possibly none.
  AddressRange pagesInside(AddressRange range) const noexcept {
    const std::size_t first = roundedUp(range.begin - begin);
    const std::size_t end = (range.begin + range.size - begin) / page_size * page_size;
    return {begin + first, end > first ? end - first : 0};
  }
};

}  // namespace torchext
