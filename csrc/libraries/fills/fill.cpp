#include "fill.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../support/large_memory.h"
#include "../support/sizes.h"
#include "../support/threads.h"
#include "fill_method.h"
#include "mt19937.h"
#include "random_fill.h"
#include "transforms.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

std::int64_t wholeChunks(std::int64_t count) {
  return count / kNormalChunk * kNormalChunk;
}

// Cuts a fill of `count` values for at most `at::get_num_threads()` threads, or for the calling thread alone inside a
// parallel region of PyTorch.
Pieces slicesOf(std::int64_t count) {
  constexpr std::int64_t kWorthAThread = 131072;  // values: 0.1 ms or more
  const std::int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads();
  const std::int64_t slices = std::clamp<std::int64_t>(count / kWorthAThread, 1, threads);
  const std::int64_t size = (count + slices - 1) / slices;
  return {count, std::max(kNormalChunk, wholeChunks(size + kNormalChunk - 1))};
}

// Returns the engines at the beginning of each slice, if the fill begins with `engine`. All distances are equal, so
// that one polynomial serves all jumps (`advance()`).
std::vector<Engine> startsOf(const Pieces& slices, const Engine& engine, std::uint64_t draws_of_value) {
  std::vector<Engine> starts{engine};
  while (toSigned(starts.size()) < slices.count) {
    starts.push_back(starts.back());
    advance(starts.back(), static_cast<std::uint64_t>(slices.size) * draws_of_value);
  }
  return starts;
}

// ---- Fills ----

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

// Returns the part of `run` in [begin, end).
FillRun clipped(const FillRun& run, std::int64_t begin, std::int64_t end, std::int64_t element_bytes) {
  const std::int64_t from = std::max(run.begin, begin);
  return {from, std::min(run.end, end), static_cast<std::byte*>(run.values) + (from - run.begin) * element_bytes};
}

// Returns the pages of the memory of `runs` from `begin` on.
FreshPages pagesOf(c10::ArrayRef<FillRun> runs, void* begin, std::int64_t element_bytes) {
  const FillRun& last = runs.back();
  const auto* end = static_cast<std::byte*>(last.values) + (last.end - last.begin) * element_bytes;
  return {begin, toSize(end - static_cast<std::byte*>(begin))};
}

// ---- Fills within bounds ----

constexpr std::int64_t kBoundedStretch = 4096;  // values: fits in a first-level cache

RandomFill normalOf(const TruncatedFill& fill) {
  return {Distribution::Normal, fill.dtype, fill.mean, fill.std};
}

// Returns the number of random numbers that one fill of `count` values draws.
std::int64_t drawsOfFill(c10::ScalarType dtype, std::int64_t count) {
  const std::int64_t rest = count % kNormalChunk;
  return rest == 0 ? count : count - rest + drawsOfRest(dtype, rest) + kNormalChunk;
}

// A chunk with values out of bounds: bit i of the mask stands for value i. The values after the last whole chunk of a
// fill count as a chunk.
struct Pending {
  std::int64_t chunk;  // its first value
  std::uint32_t run;
  std::uint16_t mask;
};

// Fills a part of the memory, round by round. A part is small enough for a list of its pending chunks. It has one or
// more runs, in order, each of whole chunks except at the end of the fill, where the rest belongs to the chunk before.
class Part {
 public:
  Part(const TruncatedFill& fill, std::int64_t count, c10::ArrayRef<FillRun> runs)
      : fill_{fill},
        normal_{normalOf(fill)},
        outside_{kernelsFor(fill.dtype)->outside},
        element_bytes_{static_cast<std::int64_t>(c10::elementSize(fill.dtype))},
        count_{count},
        runs_{runs},
        begin_{runs.front().begin} {}

  // Returns the number of rounds. Advances `engine` from the beginning to the end of this part in the first round.
  std::int64_t compute(Engine& engine) {
    Engine round = engine;
    fillAll(engine);
    std::int64_t rounds = 1;
    for (; !pending_.empty(); ++rounds) {
      // The distance is the same in each round, so that one polynomial serves all jumps (`advance()`).
      advance(round, static_cast<std::uint64_t>(drawsOfFill(fill_.dtype, count_)));
      fillPending(round);
    }
    return rounds;
  }

 private:
  using Buffer = std::array<float, kBoundedStretch + kNormalChunk>;

  std::int64_t drawsUntil(std::int64_t value) const {
    return value == count_ ? drawsOfFill(fill_.dtype, count_) : value;
  }

  // Returns null if only the rounds are counted.
  std::byte* at(const FillRun& run, std::int64_t value) const {
    auto* values = static_cast<std::byte*>(run.values);
    return values == nullptr ? nullptr : values + (value - run.begin) * element_bytes_;
  }

  void fillAll(Engine& engine) {
    std::int64_t drawn = begin_;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
      advance(engine, static_cast<std::uint64_t>(runs_[i].begin - drawn));
      fillRun(static_cast<std::uint32_t>(i), engine);
      drawn = drawsUntil(runs_[i].end);
    }
  }

  void fillRun(std::uint32_t index, Engine& engine) {
    const FillRun& run = runs_[index];
    const Pieces stretches{run.end - run.begin, kBoundedStretch};
    FreshPages pages{run.values, toSize(at(run, run.end) - at(run, run.begin))};
    for (std::int64_t i = 0; i < stretches.count; ++i) {
      const auto [from, to] = stretches.piece(i);
      std::byte* own = at(run, run.begin + from);
      pages.provide(at(run, run.begin + to));
      void* values = own == nullptr ? static_cast<void*>(buffer_.data()) : own;
      fillByOwnKernel(normal_, values, to - from, engine);
      scan(values, to - from);
      for (std::size_t chunk = 0; chunk < masks_.size(); ++chunk) {
        if (masks_[chunk] != 0) {
          const std::int64_t first = run.begin + from + toSigned(chunk) * kNormalChunk;
          pending_.push_back({first, index, masks_[chunk]});
        }
      }
    }
  }

  // Computes the masks of `count` values.
  void scan(const void* values, std::int64_t count) {
    const std::int64_t rest = count % kNormalChunk;
    masks_.resize(toSize((count + kNormalChunk - 1) / kNormalChunk));
    outside_(values, count - rest, fill_.low, fill_.high, masks_.data());
    if (rest > 0) {
      const auto* last = static_cast<const std::byte*>(values) + (count - kNormalChunk) * element_bytes_;
      outside_(last, kNormalChunk, fill_.low, fill_.high, &masks_.back());
      masks_.back() = static_cast<std::uint16_t>(masks_.back() >> static_cast<unsigned>(kNormalChunk - rest));
    }
  }

  // Fills the pending chunks again. `engine` is at the beginning of this part in the round.
  void fillPending(Engine engine) {
    std::int64_t drawn = begin_;
    std::size_t kept = 0;
    for (std::size_t first = 0; first < pending_.size();) {
      const std::size_t last = endOfSpan(first);
      const std::int64_t from = startOf(pending_[first]);
      const std::int64_t to = endOf(pending_[last - 1]);
      advance(engine, static_cast<std::uint64_t>(from - drawn), Recurs::kNo);
      fillByOwnKernel(normal_, buffer_.data(), to - from, engine);
      scan(buffer_.data(), to - from);
      for (; first < last; ++first) {
        Pending chunk = pending_[first];
        replace(chunk, from);
        chunk.mask &= masks_[toSize((chunk.chunk - from) / kNormalChunk)];
        if (chunk.mask != 0) {
          pending_[kept++] = chunk;
        }
      }
      drawn = drawsUntil(to);
    }
    pending_.resize(kept);
  }

  // Adjacent chunks are filled at once, together with the values between them.
  std::size_t endOfSpan(std::size_t first) const {
    constexpr std::int64_t kGap = 4 * kNormalChunk;
    const std::int64_t limit = startOf(pending_[first]) + kBoundedStretch - kNormalChunk;
    std::size_t last = first + 1;
    const auto belongs = [&](const Pending& next, std::int64_t end) {
      return startOf(next) < end || (startOf(next) <= end + kGap && endOf(next) <= limit);
    };
    while (last < pending_.size() && belongs(pending_[last], endOf(pending_[last - 1]))) {
      ++last;
    }
    return last;
  }

  // The range that must be filled for a chunk. The last whole chunk and the rest after it are one fill.
  std::int64_t startOf(const Pending& pending) const {
    return std::min(pending.chunk, lastWhole());
  }
  std::int64_t endOf(const Pending& pending) const {
    return pending.chunk >= lastWhole() ? count_ : pending.chunk + kNormalChunk;
  }
  std::int64_t lastWhole() const {
    return wholeChunks(count_) - kNormalChunk;
  }

  // Copies the pending values of `chunk` from the buffer, which begins with the value `from`.
  void replace(const Pending& chunk, std::int64_t from) {
    std::byte* values = at(runs_[chunk.run], chunk.chunk);
    if (values == nullptr) {
      return;
    }
    const auto* source = reinterpret_cast<const std::byte*>(buffer_.data());  // NOLINT(*-reinterpret-cast)
    for (std::int64_t i = 0; i < kNormalChunk; ++i) {
      if (((static_cast<unsigned>(chunk.mask) >> static_cast<unsigned>(i)) & 1U) != 0) {
        std::memcpy(values + i * element_bytes_, source + (chunk.chunk + i - from) * element_bytes_,
                    toSize(element_bytes_));
      }
    }
  }

  const TruncatedFill& fill_;
  RandomFill normal_;
  Scan outside_;
  std::int64_t element_bytes_;
  std::int64_t count_;
  c10::ArrayRef<FillRun> runs_;
  std::int64_t begin_;
  std::vector<Pending> pending_;
  std::vector<std::uint16_t> masks_;
  alignas(64) Buffer buffer_;
};

// Returns the number of rounds for the values of one thread. The first round fills all parts in turn.
std::int64_t roundsOfSlice(const TruncatedFill& fill,
                           std::byte* values,
                           std::int64_t count,
                           std::pair<std::int64_t, std::int64_t> slice,
                           Engine engine) {
  constexpr std::int64_t kPart = std::int64_t{1} << 23;
  const auto [begin, end] = slice;
  const Pieces parts{end - begin, kPart};
  std::int64_t rounds = 0;
  for (std::int64_t i = 0; i < parts.count; ++i) {
    const auto [from, to] = parts.piece(i);
    const auto bytes = static_cast<std::int64_t>(c10::elementSize(fill.dtype));
    const FillRun run{begin + from, begin + to, values == nullptr ? nullptr : values + (begin + from) * bytes};
    rounds = std::max(rounds, Part{fill, count, run}.compute(engine));
  }
  return rounds;
}

// Returns the chunks that contain values of `run`.
FillRun wholeChunksOf(const FillRun& run, std::int64_t count) {
  const std::int64_t last = wholeChunks(count) - kNormalChunk;
  const std::int64_t begin = std::min(wholeChunks(run.begin), last);
  const std::int64_t end = wholeChunks(run.end + kNormalChunk - 1);
  return {begin, end > last + kNormalChunk || (end > last && count % kNormalChunk != 0) ? count : end, nullptr};
}

// Several runs that are computed together: their chunks are computed in separate memory and copied from there.
class Batch {
 public:
  Batch(const TruncatedFill& fill, std::int64_t count)
      : fill_{fill}, count_{count}, element_bytes_{static_cast<std::int64_t>(c10::elementSize(fill.dtype))} {}

  void add(const FillRun& run) {
    const FillRun chunks = wholeChunksOf(run, count_);
    wanted_.push_back(run);
    if (!runs_.empty() && chunks.begin <= runs_.back().end) {
      size_ += std::max<std::int64_t>(chunks.end - runs_.back().end, 0);
      runs_.back().end = std::max(runs_.back().end, chunks.end);
    } else {
      size_ += chunks.end - chunks.begin;
      runs_.push_back(chunks);
    }
  }

  std::int64_t size() const noexcept {
    return size_;
  }

  // `engine` must be at the beginning of the fill. The batch is empty afterwards.
  void compute(Engine engine) {
    if (runs_.empty()) {
      return;
    }
    const auto nbytes = toSize(size_ * element_bytes_);
    const std::unique_ptr<std::byte[]> memory{new std::byte[nbytes]};  // NOLINT(*-arrays): a vector would write zeros
    FreshPages{memory.get(), nbytes}.provide(memory.get() + nbytes);
    std::byte* next = memory.get();
    for (FillRun& run : runs_) {
      run.values = next;
      next += (run.end - run.begin) * element_bytes_;
    }
    advance(engine, static_cast<std::uint64_t>(runs_.front().begin));
    Part{fill_, count_, runs_}.compute(engine);
    FreshPages pages = pagesOf(wanted_, wanted_.front().values, element_bytes_);
    const FillRun* source = runs_.data();
    for (const FillRun& run : wanted_) {
      pages.provide(static_cast<std::byte*>(run.values) + (run.end - run.begin) * element_bytes_);
      while (run.begin >= source->end) {
        ++source;
      }
      std::memcpy(run.values, clipped(*source, run.begin, run.end, element_bytes_).values,
                  toSize((run.end - run.begin) * element_bytes_));
    }
    wanted_.clear();
    runs_.clear();
    size_ = 0;
  }

 private:
  const TruncatedFill& fill_;
  std::int64_t count_;
  std::int64_t element_bytes_;
  std::vector<FillRun> wanted_;
  std::vector<FillRun> runs_;
  std::int64_t size_ = 0;
};

float roundedTo(c10::ScalarType dtype, double number) {
  const auto single = static_cast<float>(number);
  switch (dtype) {
    case c10::kBFloat16:
      return static_cast<c10::BFloat16>(single);
    case c10::kHalf:
      return static_cast<c10::Half>(single);
    default:
      return single;
  }
}

}  // namespace

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

bool fillRandomly(const RandomFill& fill, void* values, std::int64_t count, Engine& engine, AfterStretch after) {
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

TruncatedFill TruncatedFill::between(c10::ScalarType dtype, double mean, double std, double a, double b) {
  return {dtype, mean, std, roundedTo(dtype, a), roundedTo(dtype, b)};
}

bool canFillParts(const TruncatedFill& fill, std::int64_t count, const Engine& engine) {
  return fillMethodFor(normalOf(fill), count, engine) == fillByOwnKernel;
}

std::optional<std::uint64_t> fillTruncated(const TruncatedFill& fill,
                                           void* values,
                                           std::int64_t count,
                                           Engine& engine) {
  if (!canFillParts(fill, count, engine)) {
    return std::nullopt;
  }
  const Pieces slices = slicesOf(count);
  const std::vector<Engine> starts = startsOf(slices, engine, drawsOfValue(fill.dtype));
  std::vector<std::int64_t> rounds(starts.size());
  runAtOnce(slices.count, [&](std::int64_t i) {
    const auto index = toSize(i);
    rounds[index] = roundsOfSlice(fill, static_cast<std::byte*>(values), count, slices.piece(i), starts[index]);
  });
  const std::int64_t most = *std::max_element(rounds.begin(), rounds.end());
  const auto draws = static_cast<std::uint64_t>(most * drawsOfFill(fill.dtype, count));
  advance(engine, draws);
  return draws;
}

void fillParts(const TruncatedFill& fill, std::int64_t count, c10::ArrayRef<FillRun> runs, const Engine& engine) {
  if (runs.empty()) {
    return;
  }
  constexpr std::int64_t kBatch = std::int64_t{1} << 22U;  // values: 16 MiB of float32
  const std::int64_t first = wholeChunks(runs.front().begin);
  const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(fill.dtype));
  const Pieces slices = slicesOf(runs.back().end - first);
  runAtOnce(slices.count, [&](std::int64_t i) {
    const auto [from, to] = slices.piece(i);
    Batch batch{fill, count};
    for (const FillRun& run : runs) {
      for (std::int64_t begin = std::max(run.begin, first + from); begin < std::min(run.end, first + to);) {
        const std::int64_t end = std::min({run.end, first + to, begin + kBatch});
        batch.add(clipped(run, begin, end, element_bytes));
        begin = end;
        if (batch.size() >= kBatch) {
          batch.compute(engine);
        }
      }
    }
    batch.compute(engine);
  });
}

}  // namespace torchext
