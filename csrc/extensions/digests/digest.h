#pragma once

// Detects whether memory has changed, without keeping a copy of it.

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <torchext/macros.h>

namespace torchext {

// 128 bits of the bytes that a tensor shows. A change within one 8-byte word always changes them; any other change
// leaves them unchanged with a probability of about 2^-64. They do not protect against deliberate collisions.
struct Digest {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  bool operator==(const Digest& other) const noexcept {
    return low == other.low && high == other.high;
  }
};

// Returns the digest of the elements of `tensor`, which must be strided and have memory. Two tensors of the same shape,
// strides and dtype that show the same bytes have the same digest, on any device. Reads on all threads.
TORCHEXT_API Digest digestOf(const at::Tensor& tensor);

}  // namespace torchext
