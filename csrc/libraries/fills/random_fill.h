#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>

namespace torchext {

enum class Distribution : std::uint8_t { Uniform, Normal };

constexpr int kDistributions = 2;

// The arguments of `at::uniform_(from, to)` or `at::normal_(mean, std)`.
struct RandomFill {
  Distribution distribution;
  c10::ScalarType dtype;
  double first;   // from, or mean
  double second;  // to, or std
};

// PyTorch computes normal values from this many random numbers at a time: the first half are radii, the second half
// angles.
constexpr std::int64_t kNormalChunk = 16;

}  // namespace torchext
