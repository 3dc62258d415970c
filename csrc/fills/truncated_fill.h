#pragma once

// Normal values within bounds, by the rounds of `torch.nn.init.trunc_normal_`: a first fill of all values, and then,
// while any is out of bounds, another fill of as many, of which those are taken that replace what is out of bounds.
//
// In all rounds but the first nearly every number is drawn for nothing. Here these are skipped: a round computes the
// groups of values that still need it, and moves the engine over the others.

#include <cstdint>
#include <optional>

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/core/ScalarType.h>
#include <torchext/macros.h>

namespace torchext {

struct TruncatedFill {
  c10::ScalarType dtype;
  double mean;
  double std;
  // What is in [low, high] is accepted. Both are numbers that an element of `dtype` can be.
  float low;
  float high;

  // With bounds that are rounded to such numbers.
  TORCHEXT_API static TruncatedFill between(c10::ScalarType dtype, double mean, double std, double a, double b);
};

// Does to `count` neighbouring elements of memory, and to `engine`, what the rounds above do to a contiguous tensor and
// its generator. With null for `values` only the engine is moved. Uses up to `at::get_num_threads()` threads. Does not
// end if no value is within the bounds.
//
// Returns how many random numbers it has drawn; nothing, and has changed nothing, where this cannot be done: like
// `fillRandomly()`, and where there is no exact kernel of our own.
TORCHEXT_API std::optional<std::uint64_t> fillTruncated(const TruncatedFill& fill,
                                                        void* values,
                                                        std::int64_t count,
                                                        at::mt19937_data_pod& engine);

}  // namespace torchext
