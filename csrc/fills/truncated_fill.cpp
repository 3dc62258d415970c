#include "truncated_fill.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "exactness.h"
#include "mt19937_jump.h"
#include "own_fill.h"
#include "pieces.h"
#include "random_fill.h"
#include "slices.h"
#include "threads.h"
#include "transforms.h"
#include "twister.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

constexpr std::int64_t kStretch = 4096;  // values: what a first-level cache holds

// How many random numbers one fill of `count` values takes.
std::int64_t drawsOfFill(c10::ScalarType dtype, std::int64_t count) {
  const std::int64_t rest = count % kNormalChunk;
  return rest == 0 ? count : count - rest + drawsOfRest(dtype, rest) + kNormalChunk;
}

// The values of a chunk that are out of bounds: bit i of the mask is for value i. What is in no whole chunk at the end
// of a fill counts as one.
struct Pending {
  std::int64_t chunk;  // its first value
  std::uint16_t mask;
};

// Fills a part of the memory, round by round, which is small enough for a list of what is pending.
class Part {
 public:
  Part(const TruncatedFill& fill, std::byte* values, std::int64_t count, std::int64_t begin, std::int64_t end)
      : fill_{fill},
        normal_{Distribution::Normal, fill.dtype, fill.mean, fill.std},
        outside_{kernelsFor(fill.dtype)->outside},
        element_bytes_{static_cast<std::int64_t>(c10::elementSize(fill.dtype))},
        values_{values},
        count_{count},
        begin_{begin},
        end_{end} {}

  // Returns how many rounds it takes, and moves `engine` from where the fill of this part begins in the first round to
  // where it ends.
  std::int64_t compute(Engine& engine) {
    fillAll(engine);
    Engine later = engine;
    std::int64_t drawn = drawsUntil(end_);
    std::int64_t rounds = 1;
    for (; !pending_.empty(); ++rounds) {
      advance(later, static_cast<std::uint64_t>(drawsOfFill(fill_.dtype, count_) - drawn + begin_));
      drawn = fillPending(later);
    }
    return rounds;
  }

 private:
  using Buffer = std::array<float, kStretch + kNormalChunk>;

  std::int64_t drawsUntil(std::int64_t value) const {
    return value == count_ ? drawsOfFill(fill_.dtype, count_) : value;
  }

  std::byte* at(std::int64_t value) const {
    return values_ + value * element_bytes_;
  }

  void fillAll(Engine& engine) {
    const Pieces stretches{end_ - begin_, kStretch};
    for (std::int64_t i = 0; i < stretches.count; ++i) {
      const auto [from, to] = stretches.piece(i);
      void* values = values_ == nullptr ? static_cast<void*>(buffer_.data()) : at(begin_ + from);
      fillByOwnKernel(normal_, values, to - from, engine);
      scan(values, to - from);
      for (std::size_t chunk = 0; chunk < masks_.size(); ++chunk) {
        if (masks_[chunk] != 0) {
          pending_.push_back({begin_ + from + static_cast<std::int64_t>(chunk) * kNormalChunk, masks_[chunk]});
        }
      }
    }
  }

  // Makes the masks of `count` values.
  void scan(const void* values, std::int64_t count) {
    const std::int64_t rest = count % kNormalChunk;
    masks_.resize(static_cast<std::size_t>((count + kNormalChunk - 1) / kNormalChunk));
    outside_(values, count - rest, fill_.low, fill_.high, masks_.data());
    if (rest > 0) {
      const auto* last = static_cast<const std::byte*>(values) + (count - kNormalChunk) * element_bytes_;
      outside_(last, kNormalChunk, fill_.low, fill_.high, &masks_.back());
      masks_.back() = static_cast<std::uint16_t>(masks_.back() >> static_cast<unsigned>(kNormalChunk - rest));
    }
  }

  // Moves `engine`, which is at the beginning of this part, over one round. Returns how many numbers the round has
  // drawn by then, counted from the beginning of the whole fill.
  std::int64_t fillPending(Engine& engine) {
    std::int64_t drawn = begin_;
    std::size_t kept = 0;
    for (std::size_t first = 0; first < pending_.size();) {
      const std::size_t last = endOfSpan(first);
      const std::int64_t from = startOf(pending_[first]);
      const std::int64_t to = endOf(pending_[last - 1]);
      advance(engine, static_cast<std::uint64_t>(from - drawn));
      fillByOwnKernel(normal_, buffer_.data(), to - from, engine);
      scan(buffer_.data(), to - from);
      for (; first < last; ++first) {
        Pending chunk = pending_[first];
        replace(chunk, from);
        chunk.mask &= masks_[static_cast<std::size_t>((chunk.chunk - from) / kNormalChunk)];
        if (chunk.mask != 0) {
          pending_[kept++] = chunk;
        }
      }
      drawn = drawsUntil(to);
    }
    pending_.resize(kept);
    return drawn;
  }

  // Chunks that are near each other are filled at once, with what lies between them.
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

  // What has to be filled for a chunk. The last whole chunk and what follows it are one fill.
  std::int64_t startOf(const Pending& pending) const {
    return std::min(pending.chunk, lastWhole());
  }
  std::int64_t endOf(const Pending& pending) const {
    return pending.chunk >= lastWhole() ? count_ : pending.chunk + kNormalChunk;
  }
  std::int64_t lastWhole() const {
    return (count_ / kNormalChunk - 1) * kNormalChunk;
  }

  // Takes the pending values of `chunk` from the buffer, which begins with the value `from`.
  void replace(const Pending& chunk, std::int64_t from) {
    if (values_ == nullptr) {
      return;
    }
    const auto* source = reinterpret_cast<const std::byte*>(buffer_.data());  // NOLINT(*-reinterpret-cast)
    for (std::int64_t i = 0; i < kNormalChunk; ++i) {
      if (((static_cast<unsigned>(chunk.mask) >> static_cast<unsigned>(i)) & 1U) != 0) {
        std::memcpy(at(chunk.chunk + i), source + (chunk.chunk + i - from) * element_bytes_,
                    static_cast<std::size_t>(element_bytes_));
      }
    }
  }

  const TruncatedFill& fill_;
  RandomFill normal_;
  Scan outside_;
  std::int64_t element_bytes_;
  std::byte* values_;  // null if only the rounds are to be counted
  std::int64_t count_;
  std::int64_t begin_;
  std::int64_t end_;
  std::vector<Pending> pending_;
  std::vector<std::uint16_t> masks_;
  alignas(64) Buffer buffer_;
};

// The rounds that the values of one thread take. All parts are filled for the first time in turn.
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
    rounds = std::max(rounds, Part{fill, values, count, begin + from, begin + to}.compute(engine));
  }
  return rounds;
}

bool canFill(const RandomFill& fill, std::int64_t count, const Engine& engine) {
  return Twister::understands(engine) && count >= kNormalChunk && fill.second >= 0 && hasOwnKernel(fill) &&
         isOwnKernelExact(fill.distribution, fill.dtype);
}

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
  const RandomFill normal{Distribution::Normal, fill.dtype, fill.mean, fill.std};
  if (!canFill(normal, count, engine)) {
    return std::nullopt;
  }
  const Pieces slices = slicesOf(count);
  const std::vector<Engine> starts = startsOf(slices, engine, drawsOfValue(fill.dtype));
  std::vector<std::int64_t> rounds(starts.size());
  runAtOnce(slices.count, [&](std::int64_t i) {
    const auto index = static_cast<std::size_t>(i);
    rounds[index] = roundsOfSlice(fill, static_cast<std::byte*>(values), count, slices.piece(i), starts[index]);
  });
  const std::int64_t most = *std::max_element(rounds.begin(), rounds.end());
  const auto draws = static_cast<std::uint64_t>(most * drawsOfFill(fill.dtype, count));
  advance(engine, draws);
  return draws;
}

}  // namespace torchext
