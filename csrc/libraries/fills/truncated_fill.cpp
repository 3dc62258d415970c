#include "truncated_fill.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../support/sizes.h"
#include "../support/threads.h"
#include "exactness.h"
#include "fill.h"
#include "fill_method.h"
#include "mt19937_jump.h"
#include "random_fill.h"
#include "transforms.h"
#include "twister.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

constexpr std::int64_t kStretch = 4096;  // values: fits in a first-level cache

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
        begin_{runs.front().begin},
        end_{runs.back().end} {}

  // Returns the number of rounds. Advances `engine` from the beginning to the end of this part in the first round.
  std::int64_t compute(Engine& engine) {
    Engine round = engine;
    fillAll(engine);
    std::int64_t rounds = 1;
    for (; !pending_.empty(); ++rounds) {
      // The distance is the same in each round, so that one polynomial serves all jumps (mt19937_jump.h).
      advance(round, static_cast<std::uint64_t>(drawsOfFill(fill_.dtype, count_)));
      fillPending(round);
    }
    return rounds;
  }

 private:
  using Buffer = std::array<float, kStretch + kNormalChunk>;

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
    const Pieces stretches{run.end - run.begin, kStretch};
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
    const std::int64_t limit = startOf(pending_[first]) + kStretch - kNormalChunk;
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
    return (count_ / kNormalChunk - 1) * kNormalChunk;
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
  std::int64_t end_;
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

bool canFill(const RandomFill& fill, std::int64_t count, const Engine& engine) {
  return canDrawFrom(engine) && count >= kNormalChunk && fill.second >= 0 && hasOwnKernel(fill) &&
         isOwnKernelExact(fill.distribution, fill.dtype);
}

// ---- Parts ----

// Returns the chunks that contain values of `run`.
FillRun wholeChunksOf(const FillRun& run, std::int64_t count) {
  const std::int64_t last = (count / kNormalChunk - 1) * kNormalChunk;
  const std::int64_t begin = std::min(run.begin / kNormalChunk * kNormalChunk, last);
  const std::int64_t end = (run.end + kNormalChunk - 1) / kNormalChunk * kNormalChunk;
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
      std::memcpy(run.values, static_cast<std::byte*>(source->values) + (run.begin - source->begin) * element_bytes_,
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

TruncatedFill TruncatedFill::between(c10::ScalarType dtype, double mean, double std, double a, double b) {
  return {dtype, mean, std, roundedTo(dtype, a), roundedTo(dtype, b)};
}

std::optional<std::uint64_t> fillTruncated(const TruncatedFill& fill,
                                           void* values,
                                           std::int64_t count,
                                           at::mt19937_data_pod& engine) {
  if (!canFill(normalOf(fill), count, engine)) {
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

bool canFillParts(const TruncatedFill& fill, std::int64_t count, const Engine& engine) {
  return canFill(normalOf(fill), count, engine);
}

void fillParts(const TruncatedFill& fill, std::int64_t count, c10::ArrayRef<FillRun> runs, const Engine& engine) {
  if (runs.empty()) {
    return;
  }
  constexpr std::int64_t kBatch = std::int64_t{1} << 22U;  // values: 16 MiB of float32
  const std::int64_t first = runs.front().begin / kNormalChunk * kNormalChunk;
  const auto element_bytes = static_cast<std::int64_t>(c10::elementSize(fill.dtype));
  const Pieces slices = slicesOf(runs.back().end - first);
  runAtOnce(slices.count, [&](std::int64_t i) {
    const auto [from, to] = slices.piece(i);
    Batch batch{fill, count};
    for (const FillRun& run : runs) {
      for (std::int64_t begin = std::max(run.begin, first + from); begin < std::min(run.end, first + to);) {
        const std::int64_t end = std::min({run.end, first + to, begin + kBatch});
        batch.add({begin, end, static_cast<std::byte*>(run.values) + (begin - run.begin) * element_bytes});
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
