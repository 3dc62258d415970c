#pragma once

// Random fills of memory by several threads, bitwise equal to one call of the PyTorch operator (NOTE [Fill kernels],
// transforms.h). A part of a fill is computed without the rest: the generator skips the values before and between.

#include <cstdint>
#include <optional>

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

#include "random_fill.h"

namespace torchext {

// Called for each stretch [begin, end) of final values, on the thread that filled them, while they are in its cache.
// Several threads call it at once. Each value is in one stretch, which may be short. An exception ends the fill and
// propagates to the caller of `fillRandomly()`.
using AfterStretch = c10::function_ref<void(std::int64_t begin, std::int64_t end)>;

inline void doNothing(std::int64_t /*begin*/, std::int64_t /*end*/) {}

// Fills `count` contiguous elements as PyTorch's CPU kernel for contiguous tensors does with a generator whose engine
// is `engine`, and advances `engine` likewise. A large fill uses up to `at::get_num_threads()` threads, but only the
// calling thread inside a parallel region of PyTorch. Changes no generator.
//
// Returns false without changes if the caller must run the operator: for arguments that PyTorch rejects, normal fills
// of less than 16 elements (which draw differently), dtypes without such fills, and engine states that PyTorch does not
// produce. After an exception, `engine` is unchanged and the values are undefined.
TORCHEXT_API bool fillRandomly(const RandomFill& fill,
                               void* values,
                               std::int64_t count,
                               at::mt19937_data_pod& engine,
                               AfterStretch after = doNothing);

// Normal values within bounds, by the rounds of `torch.nn.init.trunc_normal_`: a fill of all values, and then, while
// any is out of bounds, another fill of the same size whose values replace those out of bounds.
//
// After the first round nearly all numbers are drawn in vain. Here they are skipped: a round computes the chunks that
// still have values out of bounds, and advances the engine over the others.
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

// The values [begin, end) of a fill, and the memory for them.
struct FillRun {
  std::int64_t begin;
  std::int64_t end;
  void* values;
};

// Returns true if parts of a fill of `count` values by an engine in the state `engine` can be computed.
TORCHEXT_API bool canFillParts(const RandomFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);
bool canFillParts(const TruncatedFill& fill, std::int64_t count, const at::mt19937_data_pod& engine);

// Computes `runs` of a fill of `count` values that begins with `engine`, on several threads, in time proportional to
// the number of values in them. The runs must be sorted and must not overlap, and their memory must be consecutive.
// Requires `canFillParts()`.
TORCHEXT_API void fillParts(const RandomFill& fill,
                            std::int64_t count,
                            c10::ArrayRef<FillRun> runs,
                            const at::mt19937_data_pod& engine);
void fillParts(const TruncatedFill& fill,
               std::int64_t count,
               c10::ArrayRef<FillRun> runs,
               const at::mt19937_data_pod& engine);

}  // namespace torchext
