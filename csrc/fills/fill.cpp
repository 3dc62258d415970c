#include "fill.h"

#include <algorithm>
#include <cfloat>
#include <cstddef>
#include <limits>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "exactness.h"
#include "own_fill.h"
#include "pieces.h"
#include "pytorch_fill.h"
#include "slices.h"
#include "threads.h"
#include "twister.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;
using Method = void (*)(const RandomFill&, void*, std::int64_t, Engine&);

// ---- What PyTorch accepts ----

double largestOf(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return FLT_MAX;
    case c10::kBFloat16:
      return static_cast<double>(std::numeric_limits<c10::BFloat16>::max());
    case c10::kHalf:
      return static_cast<double>(std::numeric_limits<c10::Half>::max());
    default:
      return DBL_MAX;
  }
}

// Numbers that are not, and comparisons with them, are refused here too.
bool isRange(double from, double to, c10::ScalarType dtype) {
  const double largest = largestOf(dtype);
  const bool is_inside = -largest <= from && from <= to && to <= largest && to - from <= largest;
  if (!is_inside || dtype == c10::kDouble) {
    return is_inside;
  }
  // The kernel computes in single precision, where the width may be rounded up.
  return static_cast<float>(to) - static_cast<float>(from) <= FLT_MAX;
}

bool isAccepted(const RandomFill& fill, std::int64_t count) {
  if (fill.distribution == Distribution::Uniform) {
    return isRange(fill.first, fill.second, fill.dtype);
  }
  return fill.second >= 0 && count >= kNormalChunk;
}

// ---- How to compute it ----

// Null where neither way is PyTorch's to the last bit.
Method methodFor(const RandomFill& fill) {
  if (!arePiecesExact(fill.distribution, fill.dtype)) {
    return nullptr;
  }
  return hasOwnKernel(fill) && isOwnKernelExact(fill.distribution, fill.dtype) ? fillByOwnKernel : fillByPyTorch;
}

// One that is being computed, by one or several threads.
struct Job {
  const RandomFill& fill;
  std::byte* values;
  Method method;
  AfterStretch after;

  void computeStretch(std::int64_t begin, std::int64_t end, Engine& engine) const {
    method(fill, values + begin * static_cast<std::int64_t>(c10::elementSize(fill.dtype)), end - begin, engine);
    after(begin, end);
  }

  // Moves `engine` from the beginning to the end of the slice.
  void computeSlice(std::int64_t begin, std::int64_t end, Engine& engine) const {
    constexpr std::int64_t kStretch = 16384;  // values: 64 KiB of float32, for a second-level cache
    const Pieces stretches{end - begin, kStretch};
    for (std::int64_t i = 0; i < stretches.count; ++i) {
      const auto [from, to] = stretches.piece(i);
      computeStretch(begin + from, begin + to, engine);
    }
  }
};

}  // namespace

bool fillRandomly(
    const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine, AfterStretch after) {
  if (!Twister::understands(engine) || !isAccepted(fill, count)) {
    return false;
  }
  const Method method = methodFor(fill);
  if (method == nullptr) {
    return false;
  }
  if (count == 0) {
    return true;
  }
  const Job job{fill, static_cast<std::byte*>(values), method, after};
  const Pieces slices = slicesOf(count);
  std::vector<Engine> engines = startsOf(slices, engine, drawsOfValue(fill.dtype));
  runAtOnce(slices.count, [&](std::int64_t i) {
    const auto [begin, end] = slices.piece(i);
    job.computeSlice(begin, end, engines[static_cast<std::size_t>(i)]);
  });
  engine = engines.back();
  return true;
}

}  // namespace torchext
