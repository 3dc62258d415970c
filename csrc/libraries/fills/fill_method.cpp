#include "fill_method.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/normal_ops.h>
#include <ATen/ops/uniform_ops.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include "../support/included_key.h"
#include "../support/sizes.h"
#include "mt19937.h"
#include "random_fill.h"
#include "transforms.h"

namespace torchext {

namespace {

using Engine = at::mt19937_data_pod;

// ---- The two methods ----

constexpr std::int64_t kNumbers = 4096;  // fits in a first-level cache together with the values
static_assert(kNumbers % kNormalChunk == 0);

// A fill in progress: its position in memory and on the engine.
class OwnFill {
 public:
  OwnFill(const RandomFill& fill, void* values, Engine& engine)
      : fill_{fill},
        transform_{kernelsFor(fill.dtype)->transform(fill.distribution)},
        element_bytes_{static_cast<std::int64_t>(c10::elementSize(fill.dtype))},
        next_{static_cast<std::byte*>(values)},
        engine_{engine} {}

  void write(std::int64_t count) {
    while (count > 0) {
      const std::int64_t part = std::min(count, kNumbers);
      drawNumbers(engine_, numbers_.data(), part);
      transform_(numbers_.data(), next_, part, static_cast<float>(fill_.first), static_cast<float>(fill_.second));
      next_ += part * element_bytes_;
      count -= part;
    }
  }

  void stepBack(std::int64_t count) {
    next_ -= count * element_bytes_;
  }

  void draw(std::int64_t count) {
    drawNumbers(engine_, numbers_.data(), count);
  }

 private:
  const RandomFill& fill_;
  Transform transform_;
  std::int64_t element_bytes_;
  std::byte* next_;
  Engine& engine_;
  alignas(64) std::array<std::uint32_t, kNumbers> numbers_;
};

// If the last chunk is not whole, PyTorch computes the last 16 values again.
void writeNormals(OwnFill& own, const RandomFill& fill, std::int64_t count) {
  const std::int64_t rest = count % kNormalChunk;
  own.write(count - rest);
  if (rest > 0) {
    own.draw(drawsOfRest(fill.dtype, rest));
    own.stepBack(kNormalChunk - rest);
    own.write(kNormalChunk);
  }
}

// Returns true if torchext has a kernel for the fill on this processor. A parameter that is infinite in single
// precision produces NaN values, whose bits may differ.
bool hasOwnKernel(const RandomFill& fill) {
  return std::abs(fill.first) <= FLT_MAX && std::abs(fill.second) <= FLT_MAX && kernelsFor(fill.dtype) != nullptr;
}

// Fills memory by PyTorch's CPU kernel, and advances the engine. Modes, torchext handlers, autograd, autocast and
// profilers of the thread do not observe the call, and user generators stay unchanged.
void fillByPyTorch(const RandomFill& fill, void* values, std::int64_t count, Engine& engine) {
  const KernelsOnly guard;
  at::Tensor tensor = at::from_blob(values, {count}, at::dtype(fill.dtype));
  const at::Generator generator = at::detail::createCPUGenerator();
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937 own_engine;
  own_engine.set_data(engine);
  impl.set_engine(own_engine);
  // Calling an operator notifies the profiler, redispatching does not.
  if (fill.distribution == Distribution::Normal) {
    at::_ops::normal_::redispatch(KernelsOnly::kCpu, tensor, fill.first, fill.second, generator);
  } else {
    at::_ops::uniform_::redispatch(KernelsOnly::kCpu, tensor, fill.first, fill.second, generator);
  }
  engine = impl.engine().data();
}

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

// Random numbers of 24 bits whose normal values change if any single step of the arithmetic is rounded
// differently. Most numbers do not qualify: a single step may affect two of 2^24. They were found by testing all
// numbers with each step of lanes.h altered in turn. Three steps are missing because they change no value.

constexpr std::array<std::uint32_t, 109> kSensitiveRadii{
    1189239, 1255819, 1260143, 1268812, 1278277, 1282584, 1292247, 1320436, 1320594,  1334705,  1345976,
    1414921, 1415187, 1416287, 1450208, 1457169, 1467730, 1483113, 1508261, 1708430,  1740608,  1749458,
    1848365, 1884726, 1953178, 2111131, 2331110, 2353882, 2355447, 2371852, 2441074,  2455403,  2463216,
    2646301, 2665740, 2801929, 2831977, 2904882, 2964830, 2989951, 3082218, 3297982,  3298733,  3301266,
    3327023, 3329714, 3389323, 3447255, 3482314, 3929105, 3931303, 3958949, 4079028,  4080024,  4087259,
    4206650, 4208728, 4210373, 4244527, 4274100, 4396719, 4421196, 4456626, 4468068,  4542072,  4586953,
    4681109, 4843338, 4915597, 4916103, 4918153, 4918833, 4918992, 4919774, 4921096,  4924456,  4925965,
    4928079, 4928463, 4928519, 4929732, 4929785, 4930610, 4931619, 4931751, 4942925,  4956581,  4969555,
    4997690, 5021598, 5022375, 5032214, 5034506, 5035797, 5043206, 5045467, 5048500,  5055982,  5075273,
    5076405, 5094628, 5145537, 5198565, 5292536, 5331710, 5553257, 6490648, 10919977, 11068539,
};

constexpr std::array<std::uint32_t, 90> kSensitiveAngles{
    77249,    97028,    105222,   128283,   128969,   139221,   146696,  152209,  161148,  161801,  163692,  167871,
    168373,   171681,   174130,   184122,   492187,   500199,   556315,  557938,  570904,  595346,  623262,  627358,
    630534,   649234,   654022,   655184,   660860,   662479,   668540,  679205,  693988,  695905,  696047,  802674,
    814481,   854034,   873123,   884114,   902694,   933585,   962270,  972589,  982989,  992674,  997723,  1006975,
    1013272,  1183958,  1254310,  1276341,  1281986,  1293837,  1297484, 1323172, 1339923, 1366339, 1442928, 1479374,
    1509922,  1525290,  1571385,  1601985,  1622319,  1633699,  1637716, 1867075, 2040320, 2099869, 2207583, 2221904,
    2225556,  2257837,  2579972,  5321980,  5765689,  5882376,  6061379, 6173678, 6288739, 6294173, 6300290, 6521533,
    10596191, 12582909, 12582912, 12582913, 14569632, 14569633,
};

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

// Returns the cached result of a comparison. Concurrent threads may compute the same result twice: that costs less than
// a lock, which another thread may hold during a fork.
template <bool (*kCompare)(Distribution, c10::ScalarType)>
bool isExact(Distribution distribution, c10::ScalarType dtype) {
  enum class Verdict : std::uint8_t { Unknown, Exact, Other };
  constexpr auto kDtypes = static_cast<std::size_t>(c10::ScalarType::NumOptions);
  static std::array<std::array<std::atomic<Verdict>, kDtypes>, kDistributions> verdicts{};
  auto& verdict = verdicts.at(static_cast<std::size_t>(distribution)).at(static_cast<std::size_t>(dtype));
  if (verdict == Verdict::Unknown) {
    verdict = kCompare(distribution, dtype) ? Verdict::Exact : Verdict::Other;
  }
  return verdict == Verdict::Exact;
}

// ---- Arguments ----

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

// Also rejects NaN.
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

}  // namespace

void fillByOwnKernel(const RandomFill& fill, void* values, std::int64_t count, Engine& engine) {
  OwnFill own{fill, values, engine};
  if (fill.distribution == Distribution::Normal) {
    writeNormals(own, fill, count);
  } else {
    own.write(count);
  }
}

bool isOwnKernelExact(Distribution distribution, c10::ScalarType dtype) {
  return isExact<compareOwnKernel>(distribution, dtype);
}

bool arePiecesExact(Distribution distribution, c10::ScalarType dtype) {
  return drawsOfValue(dtype) > 0 && isExact<comparePieces>(distribution, dtype);
}

FillMethod fillMethodFor(const RandomFill& fill, std::int64_t count, const Engine& engine) {
  if (!canDrawFrom(engine) || !isAccepted(fill, count) || !arePiecesExact(fill.distribution, fill.dtype)) {
    return nullptr;
  }
  return hasOwnKernel(fill) && isOwnKernelExact(fill.distribution, fill.dtype) ? fillByOwnKernel : fillByPyTorch;
}

}  // namespace torchext
