#include "fill.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "../support/sizes.h"
#include "../support/threads.h"
#include "fill_method.h"
#include "mt19937_jump.h"
#include "random_fill.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

std::int64_t wholeChunks(std::int64_t count) {
  return count / kNormalChunk * kNormalChunk;
}

// Computes runs of a fill in order, on one thread.
class FillWalk {
 public:
  // `engine` is at the value `first`, and is advanced.
  FillWalk(const RandomFill& fill,
           FillMethod method,
           std::int64_t count,
           Engine& engine,
           std::int64_t first,
           const FreshPages& pages,
           AfterStretch after)
      : fill_{fill},
        method_{method},
        after_{after},
        element_bytes_{static_cast<std::int64_t>(c10::elementSize(fill.dtype))},
        count_{count},
        tail_{hasTail() ? wholeChunks(count) - kNormalChunk : count},
        engine_{engine},
        pages_{pages},
        drawn_{static_cast<std::uint64_t>(first) * drawsOfValue(fill.dtype)} {}

  void write(const FillRun& run) {
    constexpr std::int64_t kStretch = 16384;  // values: 64 KiB of float32, fits in a second-level cache
    auto* to = static_cast<std::byte*>(run.values);
    for (std::int64_t value = run.begin; value < run.end;) {
      const std::int64_t end = std::min(run.end, value + kStretch);
      pages_.provide(to + (end - value) * element_bytes_);
      const std::int64_t written = writeSome(value, end, to);
      after_(value, value + written);
      value += written;
      to += written * element_bytes_;
    }
  }

 private:
  // If the last chunk of a normal fill is not whole, PyTorch computes the last 16 values a second time. These are
  // computed together with the last whole chunk.
  bool hasTail() const {
    return fill_.distribution == Distribution::Normal && count_ % kNormalChunk != 0;
  }

  // Writes values from `begin` on and returns their number. Whole chunks are written directly to their place.
  std::int64_t writeSome(std::int64_t begin, std::int64_t end, std::byte* to) {
    const std::int64_t direct = wholeChunks(std::min(end, tail_) - begin);
    if (begin % kNormalChunk == 0 && direct > 0) {
      fill(begin, direct, to);
      return direct;
    }
    keepChunkOf(begin);
    const std::int64_t some = std::min(end, kept_end_) - begin;
    std::memcpy(to, kept_.data() + (begin - kept_begin_) * element_bytes_, toSize(some * element_bytes_));
    return some;
  }

  // Keeps the chunk, because two runs may share one.
  void keepChunkOf(std::int64_t value) {
    if (kept_begin_ <= value && value < kept_end_) {
      return;
    }
    kept_begin_ = value >= tail_ ? tail_ : wholeChunks(value);
    kept_end_ = value >= tail_ ? count_ : std::min(kept_begin_ + kNormalChunk, tail_);
    fill(kept_begin_, kept_end_ - kept_begin_, kept_.data());
  }

  void fill(std::int64_t begin, std::int64_t count, std::byte* to) {
    const std::uint64_t draws = static_cast<std::uint64_t>(begin) * drawsOfValue(fill_.dtype);
    advance(engine_, draws - drawn_);
    method_(fill_, to, count, engine_);
    drawn_ = draws + static_cast<std::uint64_t>(count) * drawsOfValue(fill_.dtype);  // nothing follows a tail
  }

  const RandomFill& fill_;
  FillMethod method_;
  AfterStretch after_;
  std::int64_t element_bytes_;
  std::int64_t count_;
  // The first value that cannot be computed chunk by chunk.
  std::int64_t tail_;
  Engine& engine_;
  FreshPages pages_;
  std::uint64_t drawn_;
  // A chunk, or the tail.
  alignas(64) std::array<std::byte, 2 * kNormalChunk * sizeof(double)> kept_;
  std::int64_t kept_begin_ = 0;
  std::int64_t kept_end_ = 0;
};

FillRun clipped(const FillRun& run, std::int64_t begin, std::int64_t end, std::int64_t element_bytes) {
  const std::int64_t from = std::max(run.begin, begin);
  return {from, std::min(run.end, end), static_cast<std::byte*>(run.values) + (from - run.begin) * element_bytes};
}

}  // namespace

FreshPages pagesOf(c10::ArrayRef<FillRun> runs, void* begin, std::int64_t element_bytes) {
  const FillRun& last = runs.back();
  const auto* end = static_cast<std::byte*>(last.values) + (last.end - last.begin) * element_bytes;
  return {begin, toSize(end - static_cast<std::byte*>(begin))};
}

bool canFillParts(const RandomFill& fill, std::int64_t count, const Engine& engine) {
  return fillMethodFor(fill, count, engine) != nullptr;
}

// The threads also divide the skipped values, which outnumber the computed ones if the runs are columns of a matrix.
void fillParts(const RandomFill& fill, std::int64_t count, c10::ArrayRef<FillRun> runs, const Engine& engine) {
  if (runs.empty()) {
    return;
  }
  const FillMethod method = fillMethodFor(fill, count, engine);
  const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(fill.dtype));
  const std::int64_t first = wholeChunks(runs.front().begin);
  const Pieces slices = slicesOf(runs.back().end - first);
  runAtOnce(slices.count, [&](std::int64_t i) {
    const auto [from, to] = slices.piece(i);
    const auto* run = std::partition_point(runs.begin(), runs.end(),
                                           [end = first + from](const FillRun& one) { return one.end <= end; });
    void* begin = clipped(*run, first + from, run->end, element_bytes).values;
    Engine own = engine;
    FillWalk walk{fill, method, count, own, 0, pagesOf(runs, begin, element_bytes), doNothing};
    for (; run != runs.end() && run->begin < first + to; ++run) {
      walk.write(clipped(*run, first + from, first + to, element_bytes));
    }
  });
}

bool fillRandomly(
    const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine, AfterStretch after) {
  const FillMethod method = fillMethodFor(fill, count, engine);
  if (method == nullptr) {
    return false;
  }
  const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(fill.dtype));
  const FillRun whole{0, count, values};
  const Pieces slices = slicesOf(count);
  std::vector<Engine> engines = startsOf(slices, engine, drawsOfValue(fill.dtype));
  runAtOnce(slices.count, [&](std::int64_t i) {
    const auto [begin, end] = slices.piece(i);
    const FillRun slice = clipped(whole, begin, end, element_bytes);
    const FreshPages pages = pagesOf(slice, slice.values, element_bytes);
    FillWalk{fill, method, count, engines[toSize(i)], begin, pages, after}.write(slice);
  });
  engine = engines.back();
  return true;
}

}  // namespace torchext
