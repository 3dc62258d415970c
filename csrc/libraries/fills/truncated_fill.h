#pragma once

// Normal values within bounds, by the rounds of `torch.nn.init.trunc_normal_`: a fill of all values, and then, while
// any is out of bounds, another fill of the same size whose values replace those out of bounds.
//
// After the first round nearly all numbers are drawn in vain. Here they are skipped: a round computes the chunks that
// still have values out of bounds, and advances the engine over the others.

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
  // Values in [low, high] are accepted. An element of `dtype` can represent both exactly.
  float low;
  float high;

  // Rounds the bounds to such numbers.
  TORCHEXT_API static TruncatedFill between(c10::ScalarType dtype, double mean, double std, double a, double b);
};

// Applies these rounds to `count` contiguous elements and to `engine`, as `trunc_normal_` does to a contiguous tensor
// and its generator. If `values` is null, only advances the engine. Uses up to `at::get_num_threads()` threads. Does
// not terminate if the bounds contain no value.
//
// Returns the number of random numbers drawn. Returns nullopt without changes in the cases of `fillRandomly()`, and if
// torchext has no exact kernel.
TORCHEXT_API std::optional<std::uint64_t> fillTruncated(const TruncatedFill& fill,
                                                        void* values,
                                                        std::int64_t count,
                                                        at::mt19937_data_pod& engine);

}  // namespace torchext
