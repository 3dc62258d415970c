#include "exactness.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/util/Exception.h>

#include "../support/sizes.h"
#include "fill_method.h"
#include "mt19937.h"
#include "mt19937_jump.h"
#include "random_fill.h"
#include "sensitive_numbers.h"
#include "twister.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

// ---- Trials ----

// A fill and the engine that it starts with.
struct Trial {
  RandomFill fill;
  std::int64_t count;
  Engine engine;
};

// The results of a fill.
struct Outcome {
  std::vector<std::byte> values;
  Engine engine;

  bool operator==(const Outcome& other) const {
    return values == other.values && areSame(engine, other.engine);
  }
};

template <typename Method>
Outcome outcomeOf(const Trial& trial, const Method& method) {
  const auto bytes = static_cast<std::size_t>(trial.count) * c10::elementSize(trial.fill.dtype);
  Outcome outcome{std::vector<std::byte>(bytes), trial.engine};
  method(trial.fill, outcome.values.data(), trial.count, outcome.engine);
  return outcome;
}

void fillInPieces(const RandomFill& fill, void* values, std::int64_t count, Engine& engine) {
  const Pieces pieces{count, 3 * kNormalChunk};
  const Engine start = engine;
  for (std::int64_t i = 0; i < pieces.count; ++i) {
    const auto [begin, end] = pieces.piece(i);
    engine = start;
    advance(engine, static_cast<std::uint64_t>(begin) * drawsOfValue(fill.dtype));
    auto* first = static_cast<std::byte*>(values) + begin * static_cast<std::int64_t>(c10::elementSize(fill.dtype));
    fillByPyTorch(fill, first, end - begin, engine);
  }
}

// ---- Numbers to try ----

constexpr std::int64_t kForged = toSigned(mt19937::kN - 1) / kNormalChunk * kNormalChunk;

// Returns an engine with the given next random numbers. The first number of a block cannot be given: drawing it makes
// the engine compute a new block.
Engine forged(const std::array<std::uint32_t, kForged>& numbers) {
  Engine engine = at::mt19937{0}.data();
  engine.left_ = static_cast<int>(mt19937::kN);
  engine.next_ = 1;
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    engine.state_[i + 1] = mt19937::wordOf(numbers[i]);
  }
  return engine;
}

// Pairs each radius with several angles and vice versa: a difference in the last bit of a factor does not always change
// the product. One of the angles is 0, whose cosine is 1.
Engine sensitiveEngine(std::size_t turn) {
  constexpr std::size_t kHalf = kNormalChunk / 2;
  std::array<std::uint32_t, kForged> numbers{};
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::size_t pair = i / kNormalChunk * kHalf + i % kHalf;
    const bool is_radius = i % kNormalChunk < kHalf;
    const std::uint32_t unused_bits = static_cast<std::uint32_t>(i) << 24U;
    const std::size_t angle = (pair + 37 * turn) % (kSensitiveAngles.size() + 1);
    const std::uint32_t angle_number = angle == kSensitiveAngles.size() ? 0 : kSensitiveAngles[angle];
    numbers[i] = unused_bits | (is_radius ? kSensitiveRadii[pair % kSensitiveRadii.size()] : angle_number);
  }
  return forged(numbers);
}

// The ends of a uniform range, where values are rounded to the excluded end, and the point where the values change
// their sign. There the product and the summand cancel, so even few digits reveal whether the product was rounded.
Engine engineOfExtremes(const RandomFill& fill) {
  const bool has_zero = fill.first < 0 && fill.second > 0;
  const auto zero = static_cast<std::uint32_t>(has_zero ? -fill.first / (fill.second - fill.first) * 0x1p24 : 0);
  std::array<std::uint32_t, kForged> numbers{};
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const auto distance = static_cast<std::uint32_t>(i / 4);
    const std::array<std::uint32_t, 4> near{distance, ~distance, zero + distance, zero - distance};
    numbers[i] = near[i % 4];
  }
  return forged(numbers);
}

// ---- Comparing ----

// Stops at the first difference.
class Comparison {
 public:
  bool isExact() const {
    return is_exact_;
  }

  void add(const Trial& trial) {
    is_exact_ = is_exact_ && outcomeOf(trial, fillByOwnKernel) == outcomeOf(trial, fillByPyTorch);
  }

  void addSizes(const RandomFill& fill) {
    constexpr std::array<std::int64_t, 5> kCounts{16, 29, 623, 1000, 2051};
    Engine engine = at::mt19937{static_cast<std::uint64_t>(fill.dtype)}.data();
    for (const std::int64_t count : kCounts) {
      add({fill, count, engine});
      advance(engine, static_cast<std::uint64_t>(count));
    }
  }

  void addSensitiveNumbers(const RandomFill& fill, std::size_t turns) {
    for (std::size_t turn = 0; turn < turns; ++turn) {
      add({fill, kForged, sensitiveEngine(turn)});
    }
  }

  // With the negated value as the mean, only the rounding error of the value remains, and its difference from
  // PyTorch's. Otherwise rounding to 8 or 11 digits hides a difference in the last bit. The standard deviation makes
  // the remainder large enough for float16.
  void addCancellations(Distribution distribution, c10::ScalarType dtype) {
    constexpr double kStd = 3001;
    Engine engine = sensitiveEngine(0);
    const RandomFill precise{distribution, c10::kFloat, 0, kStd};
    std::array<float, kForged> values{};
    Engine own_engine = engine;
    fillByOwnKernel(precise, values.data(), kForged, own_engine);
    for (std::size_t i = 0; is_exact_ && i < values.size(); ++i) {
      add({{distribution, dtype, -values[i], kStd}, kNormalChunk, engine});
      if (i % kNormalChunk == kNormalChunk - 1) {
        advance(engine, kNormalChunk);
      }
    }
  }

 private:
  bool is_exact_ = true;
};

bool compareNormals(c10::ScalarType dtype) {
  Comparison comparison;
  for (const auto& [mean, std] : {std::pair{0.0, 1.0}, {0.37, 0.0213}, {-1234.5, 77.7}}) {
    const RandomFill fill{Distribution::Normal, dtype, mean, std};
    comparison.addSizes(fill);
    comparison.addSensitiveNumbers(fill, 6);
  }
  if (dtype != c10::kFloat) {
    comparison.addCancellations(Distribution::Normal, dtype);
  }
  return comparison.isExact();
}

bool compareUniforms(c10::ScalarType dtype) {
  Comparison comparison;
  for (const auto& [from, to] : {std::pair{0.0, 1.0}, {1.0, 2.0}, {-0.0361, 0.0361}, {-0.7, 2.1}, {-1e-5, 0.0}}) {
    const RandomFill fill{Distribution::Uniform, dtype, from, to};
    comparison.addSizes(fill);
    comparison.add({fill, kForged, engineOfExtremes(fill)});
  }
  return comparison.isExact();
}

bool compareOwnKernel(Distribution distribution, c10::ScalarType dtype) {
  if (!hasOwnKernel({distribution, dtype, 0, 1})) {
    return false;
  }
  return distribution == Distribution::Normal ? compareNormals(dtype) : compareUniforms(dtype);
}

bool comparePieces(Distribution distribution, c10::ScalarType dtype) {
  for (const std::int64_t count : {160, 1000, 1009}) {
    const Trial trial{{distribution, dtype, 0.37, 0.77}, count, at::mt19937{static_cast<std::uint64_t>(count)}.data()};
    if (!(outcomeOf(trial, fillInPieces) == outcomeOf(trial, fillByPyTorch))) {
      return false;
    }
  }
  return true;
}

// ---- Verdicts ----

// The cached results of one comparison. Concurrent threads may compute the same result twice: that costs less than a
// lock, which another thread may hold during a fork.
class Verdicts {
 public:
  using Compare = bool (*)(Distribution, c10::ScalarType);

  constexpr explicit Verdicts(Compare compare) : compare_{compare} {}

  bool of(Distribution distribution, c10::ScalarType dtype) {
    auto& verdict = verdicts_.at(static_cast<std::size_t>(distribution)).at(static_cast<std::size_t>(dtype));
    if (verdict.load(std::memory_order_acquire) == Verdict::Unknown) {
      const bool is_exact = compare_(distribution, dtype);
      verdict.store(is_exact ? Verdict::Exact : Verdict::Other, std::memory_order_release);
    }
    return verdict.load(std::memory_order_acquire) == Verdict::Exact;
  }

 private:
  enum class Verdict : std::uint8_t { Unknown, Exact, Other };

  static constexpr auto kDtypes = static_cast<std::size_t>(c10::ScalarType::NumOptions);

  Compare compare_;
  std::array<std::array<std::atomic<Verdict>, kDtypes>, kDistributions> verdicts_{};
};

}  // namespace

bool isOwnKernelExact(Distribution distribution, c10::ScalarType dtype) {
  static Verdicts verdicts{compareOwnKernel};
  return verdicts.of(distribution, dtype);
}

bool arePiecesExact(Distribution distribution, c10::ScalarType dtype) {
  static Verdicts verdicts{comparePieces};
  return drawsOfValue(dtype) > 0 && verdicts.of(distribution, dtype);
}

}  // namespace torchext
