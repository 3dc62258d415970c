#include "fill.h"

#include <cstddef>
#include <vector>

#include "../support/fresh_pages.h"
#include "../support/sizes.h"
#include "../support/threads.h"
#include "fill_method.h"
#include "pieces.h"
#include "slices.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

// A fill in progress, on one or several threads.
struct Job {
  const RandomFill& fill;
  std::byte* values;
  FillMethod method;
  AfterStretch after;

  std::byte* at(std::int64_t value) const {
    return values + value * static_cast<std::int64_t>(c10::elementSize(fill.dtype));
  }

  // Advances `engine` from the beginning to the end of the slice.
  void computeSlice(std::int64_t begin, std::int64_t end, Engine& engine) const {
    constexpr std::int64_t kStretch = 16384;  // values: 64 KiB of float32, fits in a second-level cache
    const Pieces stretches{end - begin, kStretch};
    FreshPages pages{at(begin), toSize(at(end) - at(begin))};
    for (std::int64_t i = 0; i < stretches.count; ++i) {
      const auto [from, to] = stretches.piece(i);
      pages.provide(at(begin + to));
      method(fill, at(begin + from), to - from, engine);
      after(begin + from, begin + to);
    }
  }
};

}  // namespace

bool fillRandomly(
    const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine, AfterStretch after) {
  const FillMethod method = fillMethodFor(fill, count, engine);
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
    job.computeSlice(begin, end, engines[toSize(i)]);
  });
  engine = engines.back();
  return true;
}

}  // namespace torchext
