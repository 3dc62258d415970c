#include "mt19937_jump.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "../support/locks.h"
#include "../support/simd_clones.h"
#include "mt19937.h"

namespace torchext {

namespace {

constexpr std::size_t kN = mt19937::kN;
constexpr std::size_t kM = mt19937::kM;
constexpr std::size_t kR = 31;  // the number of bits of the first word that are not part of the state
constexpr std::uint32_t kA = mt19937::kA;
constexpr std::size_t kDegree = 19937;  // of the characteristic polynomial

using Words = std::array<std::uint32_t, kN>;

// ---- Polynomials over GF(2) ----

constexpr std::size_t kWordBits = 64;
constexpr std::size_t kPolynomialWords = (kDegree + kWordBits - 1) / kWordBits;

// Coefficients of a polynomial of degree less than kDegree, and of a product of two.
using Polynomial = std::array<std::uint64_t, kPolynomialWords>;
using Product = std::array<std::uint64_t, 2 * kPolynomialWords>;

// The exponents below the leading one of the characteristic polynomial, from its closed form (section 3.2 of the 1998
// paper, with w - r = 1): P * Q^31 + a_0 * P * Q^30 + ... + a_30 * P + a_31, for P = t^n + t^m and
// Q = t^(n-1) + t^(m-1).
std::vector<std::size_t> characteristicExponents() {
  std::bitset<kDegree + 1> sum;
  sum.set(0);
  for (std::size_t i = 0; i < kR; ++i) {
    sum = (sum << (kN - 1)) ^ (sum << (kM - 1));
    sum[0] = sum[0] != (((kA >> i) & 1U) != 0U);
  }
  sum = (sum << kN) ^ (sum << kM);
  sum[0] = sum[0] != (((kA >> kR) & 1U) != 0U);
  std::vector<std::size_t> exponents;
  for (std::size_t i = 0; i < kDegree; ++i) {
    if (sum[i]) {
      exponents.push_back(i);
    }
  }
  return exponents;
}

// Adds the bits of `word` to `product`; its lowest bit stands for t^position. Bits below t^0 must be 0.
void addShifted(Product& product, std::uint64_t word, std::ptrdiff_t position) {
  constexpr auto kBits = static_cast<std::ptrdiff_t>(kWordBits);
  const std::ptrdiff_t index = position >= 0 ? position / kBits : -((kBits - 1 - position) / kBits);
  const auto shift = static_cast<unsigned>(position - index * kBits);
  if (index >= 0) {
    product[static_cast<std::size_t>(index)] ^= word << shift;
  }
  if (shift != 0) {
    product[static_cast<std::size_t>(index + 1)] ^= word >> (kWordBits - shift);
  }
}

// Returns the remainder of `product` modulo the characteristic polynomial. Its second highest exponent is more than a
// word below the leading one, so whole words can be folded down in a single pass from the top.
Polynomial reduce(Product product) {
  static const std::vector<std::size_t> exponents = characteristicExponents();
  constexpr std::size_t kPartialBits = kDegree % kWordBits;
  constexpr std::uint64_t kHighBits = ~std::uint64_t{0} << kPartialBits;
  for (std::size_t i = product.size(); i-- > kPolynomialWords - 1;) {
    const std::uint64_t high = i == kPolynomialWords - 1 ? product[i] & kHighBits : product[i];
    if (high == 0) {
      continue;
    }
    product[i] ^= high;
    const auto position = static_cast<std::ptrdiff_t>(i * kWordBits) - static_cast<std::ptrdiff_t>(kDegree);
    for (const std::size_t exponent : exponents) {
      addShifted(product, high, position + static_cast<std::ptrdiff_t>(exponent));
    }
  }
  Polynomial remainder{};
  std::copy_n(product.begin(), remainder.size(), remainder.begin());
  return remainder;
}

// Inserts a zero after each bit: squaring over GF(2).
std::uint64_t spread(std::uint32_t half) {
  std::uint64_t x = half;
  x = (x | (x << 16U)) & 0x0000ffff0000ffffULL;
  x = (x | (x << 8U)) & 0x00ff00ff00ff00ffULL;
  x = (x | (x << 4U)) & 0x0f0f0f0f0f0f0f0fULL;
  x = (x | (x << 2U)) & 0x3333333333333333ULL;
  return (x | (x << 1U)) & 0x5555555555555555ULL;
}

Polynomial square(const Polynomial& p) {
  Product product{};
  for (std::size_t i = 0; i < p.size(); ++i) {
    product[2 * i] = spread(static_cast<std::uint32_t>(p[i]));
    product[2 * i + 1] = spread(static_cast<std::uint32_t>(p[i] >> 32U));
  }
  return reduce(product);
}

Polynomial timesT(const Polynomial& p) {
  Product product{};
  std::uint64_t carry = 0;
  for (std::size_t i = 0; i < p.size(); ++i) {
    product[i] = (p[i] << 1U) | carry;
    carry = p[i] >> (kWordBits - 1);
  }
  product[p.size()] = carry;
  return reduce(product);
}

// Returns t^exponent modulo the characteristic polynomial, by squaring from the highest bit down.
Polynomial power(std::uint64_t exponent) {
  Polynomial result{};
  result[0] = 1;
  for (int bit = 63; bit >= 0; --bit) {
    result = square(result);
    if (((exponent >> static_cast<unsigned>(bit)) & 1U) != 0U) {
      result = timesT(result);
    }
  }
  return result;
}

// ---- Windows ----

// Four consecutive exponents. The first one occurs in the polynomial; `lowest` is its offset in its block of kN
// exponents. `pattern` is a mask of the next three.
struct Window {
  std::uint16_t lowest;
  std::uint16_t pattern;  // bit k is set if lowest + 1 + k occurs
};

constexpr std::size_t kWindowBits = 4;
constexpr std::size_t kPatterns = std::size_t{1} << (kWindowBits - 1);

// The windows of a polynomial, block by block.
using Windows = std::array<std::vector<Window>, (kDegree + kN - 1) / kN>;

bool hasExponent(const Polynomial& p, std::size_t exponent) {
  return exponent < kDegree && ((p[exponent / kWordBits] >> (exponent % kWordBits)) & 1U) != 0U;
}

Windows windowsOf(const Polynomial& p) {
  Windows windows;
  std::size_t exponent = 0;
  while (exponent < kDegree) {
    if (!hasExponent(p, exponent)) {
      ++exponent;
      continue;
    }
    std::uint16_t pattern = 0;
    for (std::size_t k = 0; k + 1 < kWindowBits; ++k) {
      pattern = static_cast<std::uint16_t>(pattern | (hasExponent(p, exponent + 1 + k) ? 1U << k : 0U));
    }
    windows[exponent / kN].push_back({static_cast<std::uint16_t>(exponent % kN), pattern});
    exponent += kWindowBits;
  }
  return windows;
}

// The windows of t^exponent, cached: a model repeats its layers, so distances repeat.
std::shared_ptr<const Windows> powerWindows(std::uint64_t exponent) {
  constexpr std::size_t kMaxRemembered = 64;
  static std::map<std::uint64_t, std::shared_ptr<const Windows>> remembered;
  const Locked lock{LockRank::kJumps};
  if (const auto found = remembered.find(exponent); found != remembered.end()) {
    return found->second;
  }
  auto windows = std::make_shared<const Windows>(windowsOf(power(exponent)));
  if (remembered.size() == kMaxRemembered) {
    remembered.erase(remembered.begin());
  }
  remembered.emplace(exponent, windows);
  return windows;
}

// ---- Jumping ----

// For each pattern, the sums of words of two blocks that the windows of the first block select. The size of the windows
// is chosen so that the sums fit in a first-level cache.
using PatternSums = std::array<std::array<std::uint32_t, 2 * kN>, kPatterns>;

// Reads kWindowBits - 1 words beyond the two blocks.
TORCHEXT_SIMD_CLONES
void sumPatterns(const std::uint32_t* blocks, PatternSums& sums) {
  std::copy_n(blocks, 2 * kN, sums[0].data());
  for (std::size_t k = 0; k + 1 < kWindowBits; ++k) {
    const std::size_t bit = std::size_t{1} << k;
    for (std::size_t pattern = bit; pattern < 2 * bit; ++pattern) {
      const std::uint32_t* without = sums[pattern - bit].data();
      std::uint32_t* with = sums[pattern].data();
      for (std::size_t i = 0; i < 2 * kN; ++i) {
        with[i] = without[i] ^ blocks[i + k + 1];
      }
    }
  }
}

// Adds to x[j] the sum over the windows w of sums[w.pattern][w.lowest + j], for 0 <= j < kN. Processes pieces that stay
// in registers, so that a window costs one load per vector.
TORCHEXT_SIMD_CLONES
void addWindows(const PatternSums& sums, const std::vector<Window>& windows, std::uint32_t* x) {
  using Vector = std::uint32_t __attribute__((vector_size(32), aligned(4), may_alias));
  constexpr std::size_t kLanes = sizeof(Vector) / sizeof(std::uint32_t);
  constexpr std::size_t kPiece = 6 * kLanes;
  static_assert(kN % kPiece == 0);
  for (std::size_t piece = 0; piece < kN; piece += kPiece) {
    auto* out = reinterpret_cast<Vector*>(x + piece);
    Vector s0 = out[0], s1 = out[1], s2 = out[2], s3 = out[3], s4 = out[4], s5 = out[5];
    for (const Window& window : windows) {
      const auto* words = reinterpret_cast<const Vector*>(sums[window.pattern].data() + window.lowest + piece);
      s0 ^= words[0];
      s1 ^= words[1];
      s2 ^= words[2];
      s3 ^= words[3];
      s4 ^= words[4];
      s5 ^= words[5];
    }
    out[0] = s0;
    out[1] = s1;
    out[2] = s2;
    out[3] = s3;
    out[4] = s4;
    out[5] = s5;
  }
}

// Every word after the seed block is a linear function of the state, so the words obey the recurrence of the
// characteristic polynomial: the word at distance n is a sum of words in the next 33 blocks.
void jumpBlocks(Words& x, std::uint64_t blocks) {
  const auto windows = powerWindows(blocks * kN);
  std::vector<std::uint32_t> sequence((windows->size() + 2) * kN);
  std::copy(x.begin(), x.end(), sequence.begin());
  for (std::size_t i = 1; i < windows->size() + 2; ++i) {
    std::uint32_t* block = sequence.data() + i * kN;
    std::copy_n(block - kN, kN, block);
    mt19937::nextBlock(block);
  }
  x.fill(0);
  PatternSums sums;
  for (std::size_t i = 0; i < windows->size(); ++i) {
    sumPatterns(sequence.data() + i * kN, sums);
    addWindows(sums, (*windows)[i], x.data());
  }
}

void advanceBlocks(Words& x, std::uint64_t blocks) {
  constexpr std::uint64_t kJumpPaysFrom = 4096;
  if (blocks == 0) {
    return;
  }
  // The first word of a seed block does not follow the recurrence, so compute one block before any jump.
  mt19937::nextBlock(x.data());
  if (blocks > kJumpPaysFrom) {
    jumpBlocks(x, blocks - 1);
    return;
  }
  mt19937::nextBlocks(x.data(), blocks - 1);
}

}  // namespace

void advance(at::mt19937_data_pod& state, std::uint64_t draws) {
  if (draws == 0) {
    return;
  }
  // at::mt19937 counts down in `left_`: 624 after the first word of a block, 1 after the last, and 1 for a new seed.
  const std::uint64_t taken = kN + 1 - static_cast<std::uint64_t>(state.left_) + draws;
  const std::uint64_t blocks = (taken - 1) / kN;
  if (blocks == 0) {
    state.left_ -= static_cast<int>(draws);
    state.next_ += static_cast<std::uint32_t>(draws);
    return;
  }
  advanceBlocks(state.state_, blocks);
  const std::uint64_t place = taken - blocks * kN;  // 1 to 624
  state.next_ = static_cast<std::uint32_t>(place);
  state.left_ = static_cast<int>(kN + 1 - place);
}

}  // namespace torchext
