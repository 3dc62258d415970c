#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include <c10/util/Exception.h>

namespace torchext {

// Converts an integer to a size of C++. PyTorch's sizes, positions and numbers are signed. A negative one raises an
// internal error, and in a function that is `noexcept` ends the process: check numbers of the program before.
template <typename Integer>
constexpr std::size_t toSize(Integer number) {
  static_assert(std::is_integral_v<Integer> && sizeof(Integer) <= sizeof(std::size_t));
  if constexpr (std::is_signed_v<Integer>) {
    TORCH_INTERNAL_ASSERT(number >= 0, "a size is ", static_cast<std::int64_t>(number));
  }
  return static_cast<std::size_t>(number);
}

// Converts the other way. A size that is too large raises an internal error.
template <typename Integer>
constexpr std::int64_t toSigned(Integer size) {
  static_assert(std::is_integral_v<Integer> && sizeof(Integer) <= sizeof(std::int64_t));
  if constexpr (std::is_unsigned_v<Integer>) {
    TORCH_INTERNAL_ASSERT(size <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()), "a size is ",
                          size);
  }
  return static_cast<std::int64_t>(size);
}

}  // namespace torchext
