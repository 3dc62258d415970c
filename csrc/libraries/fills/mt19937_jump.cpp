#include "mt19937.h"

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include <ATen/Version.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

#include "../support/locks.h"

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

// ---- Hankel products ----

constexpr std::size_t kMostWords = 64;     // of a product that is not split
constexpr std::size_t kLargestHalf = 256;  // of one that is split

// 128 bits.
struct Pair {
  std::uint64_t low;
  std::uint64_t high;
};

// Returns the sum over i of p[i] * a[i], as products of polynomials.
using SumProducts = Pair (*)(std::size_t n, const std::uint64_t* p, const std::uint64_t* a);

Pair sumProductsByShifts(std::size_t n, const std::uint64_t* p, const std::uint64_t* a) {
  Pair sum{0, 0};
  for (std::size_t i = 0; i < n; ++i) {
    sum.low ^= a[i] & (0 - (p[i] & 1U));
    for (unsigned bit = 1; bit < 64; ++bit) {
      const std::uint64_t mask = 0 - ((p[i] >> bit) & 1U);
      sum.low ^= (a[i] << bit) & mask;
      sum.high ^= (a[i] >> (64 - bit)) & mask;
    }
  }
  return sum;
}

#if defined(__x86_64__) && defined(__GNUC__)

__attribute__((target("pclmul,sse4.1"))) Pair sumProductsByInstruction(std::size_t n,
                                                                       const std::uint64_t* p,
                                                                       const std::uint64_t* a) {
  __m128i even = _mm_setzero_si128();
  __m128i odd = even;
  std::size_t i = 0;
  for (; i + 1 < n; i += 2) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i));
    const __m128i y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i));
    even = _mm_xor_si128(even, _mm_clmulepi64_si128(x, y, 0x00));
    odd = _mm_xor_si128(odd, _mm_clmulepi64_si128(x, y, 0x11));
  }
  if (i < n) {
    const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i));
    const __m128i y = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a + i));
    even = _mm_xor_si128(even, _mm_clmulepi64_si128(x, y, 0x00));
  }
  Pair sum{};
  _mm_storeu_si128(reinterpret_cast<__m128i*>(&sum), _mm_xor_si128(even, odd));
  return sum;
}

SumProducts sumProducts() {
  const bool has_vectors = at::get_cpu_capability() != "DEFAULT";  // as PyTorch's kernels, for comparison
  return has_vectors && __builtin_cpu_supports("pclmul") ? sumProductsByInstruction : sumProductsByShifts;
}

#else

SumProducts sumProducts() {
  return sumProductsByShifts;
}

#endif

// The product of a reversed word and a word of `a` has the sums for k = -63 to 63 in order.
void multiplyDirectly(std::size_t n, const std::uint64_t* reversed, const std::uint64_t* a, std::uint64_t* c) {
  static const SumProducts sum = sumProducts();
  Pair before = sum(n, reversed, a);
  for (std::size_t k = 0; k < n; ++k) {
    const Pair after = sum(n, reversed, a + k + 1);
    c[k] = (before.low >> 63U) ^ (before.high << 1U) ^ (after.low << 1U);
    before = after;
  }
}

// Computes c_k, the sum over i of p_i * a_{i+k} over GF(2), for 64 * n bits of p and of c. Each word holds 64 bits.
//
// Args:
//   n: The number of words of p and of c. A power of two times a number of at most 64.
//   reversed: The words of p, with the bits of each word reversed.
//   a: 2 * n words.
//   c: Receives n words. Must not overlap the others.
//
// Takes three products of half the size (Karatsuba), down to products by the instruction for carryless multiplication.
void multiplyHankel(std::size_t n, const std::uint64_t* reversed, const std::uint64_t* a, std::uint64_t* c) {
  if (n <= kMostWords) {
    multiplyDirectly(n, reversed, a, c);
    return;
  }
  // The matrix of a_{i+k} consists of A0, A1 and A2, which overlap by half:
  //   A0 p0 + A1 p1 = (A0 + A1) p0 + A1 (p0 + p1)
  //   A1 p0 + A2 p1 = (A1 + A2) p1 + A1 (p0 + p1)
  const std::size_t half = n / 2;
  std::array<std::uint64_t, 2 * kLargestHalf> sum{};
  std::array<std::uint64_t, kLargestHalf> both{};
  for (std::size_t part = 0; part < 2; ++part) {
    for (std::size_t i = 0; i < n; ++i) {
      sum[i] = a[part * half + i] ^ a[(part + 1) * half + i];
    }
    multiplyHankel(half, reversed + part * half, sum.data(), c + part * half);
  }
  for (std::size_t i = 0; i < half; ++i) {
    both[i] = reversed[i] ^ reversed[half + i];
  }
  multiplyHankel(half, both.data(), a + half, sum.data());
  for (std::size_t i = 0; i < half; ++i) {
    c[i] ^= sum[i];
    c[half + i] ^= sum[i];
  }
}

// ---- Jumping ----

std::uint64_t withReversedBits(std::uint64_t word) {
  std::uint64_t result = 0;
  for (std::size_t bit = 0; bit < kWordBits; ++bit) {
    result = (result << 1U) | ((word >> bit) & 1U);
  }
  return result;
}

std::shared_ptr<const Polynomial> withReversedWords(Polynomial p) {
  std::transform(p.begin(), p.end(), p.begin(), withReversedBits);
  return std::make_shared<const Polynomial>(p);
}

// t^exponent with the bits of each word reversed, cached: a model repeats its layers, so distances repeat.
std::shared_ptr<const Polynomial> reversedPower(std::uint64_t exponent) {
  constexpr std::size_t kMaxRemembered = 64;
  // Leaked: threads may draw until the process ends.
  static auto& remembered = *new std::map<std::uint64_t, std::shared_ptr<const Polynomial>>;
  const Locked lock{LockRank::kJumps};
  if (const auto found = remembered.find(exponent); found != remembered.end()) {
    return found->second;
  }
  auto words = withReversedWords(power(exponent));
  if (remembered.size() == kMaxRemembered) {
    remembered.erase(remembered.begin());
  }
  remembered.emplace(exponent, words);
  return words;
}

constexpr std::uint64_t kJumpPaysFrom = 1024;  // blocks

// The polynomial for a jump over kJumpPaysFrom * 2^index blocks, as above. Each follows from the square of the one
// before, which takes less than a tenth of the time of another power.
std::shared_ptr<const Polynomial> reversedStep(std::size_t index) {
  static auto& remembered = *new std::vector<std::shared_ptr<const Polynomial>>;  // leaked, as above
  static Polynomial last;
  const Locked lock{LockRank::kJumps};
  while (remembered.size() <= index) {
    const Polynomial next = remembered.empty() ? power(kJumpPaysFrom * kN - 1) : timesT(square(last));
    remembered.push_back(withReversedWords(next));  // may raise an error, which leaves `last` unchanged
    last = next;
  }
  return remembered[index];
}

// Returns bit 0 of the words of `x` and of the blocks after it.
TORCHEXT_SIMD_CLONES
void readLowestBits(const Words& x, Product& bits) {
  constexpr std::size_t kHalfBits = kWordBits / 2;
  constexpr std::size_t kHalves = 2 * kN / kHalfBits;  // in two blocks
  static_assert(2 * kN % kHalfBits == 0 && 2 * std::tuple_size_v<Product> % kHalves == 0);
  std::array<std::uint32_t, 2 * std::tuple_size_v<Product>> halves{};
  std::array<std::uint32_t, 2 * kN> blocks;
  std::copy(x.begin(), x.end(), blocks.data() + kN);
  for (std::size_t first = 0; first < halves.size(); first += kHalves) {
    std::copy_n(blocks.data() + kN, kN, blocks.data());
    if (first != 0) {
      mt19937::nextBlock(blocks.data());
    }
    std::copy_n(blocks.data(), kN, blocks.data() + kN);
    mt19937::nextBlock(blocks.data() + kN);
    for (std::size_t half = 0; half < kHalves; ++half) {
      std::uint32_t word = 0;
      for (std::uint32_t i = 0; i < kHalfBits; ++i) {
        word |= (blocks[half * kHalfBits + i] & 1U) << i;
      }
      halves[first + half] = word;
    }
  }
  for (std::size_t i = 0; i < bits.size(); ++i) {
    bits[i] = halves[2 * i] | std::uint64_t{halves[2 * i + 1]} << kHalfBits;
  }
}

// Replaces bit j of consecutive words by bit j + 1, given bit 0. Word k + n is the sum of word k + m, y >> 1, and a if
// y is odd, where y consists of the upper bit of word k and the other bits of word k + 1. So bit j of words k + n and
// k + m determines bit j + 1 of word k + 1 or, if that is the upper bit, of word k, which takes its place here.
TORCHEXT_SIMD_CLONES
void shiftBit(const std::uint64_t* bit0, std::size_t count, bool adds_bit0, std::uint64_t* bits) {
  constexpr std::size_t kNextN = kN - 1, kNextM = kM - 1;
  const std::uint64_t mask = adds_bit0 ? ~std::uint64_t{0} : 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto at = [&](std::size_t bit) {
      const std::size_t word = i + bit / kWordBits;
      return bits[word] >> (bit % kWordBits) | bits[word + 1] << (kWordBits - bit % kWordBits);
    };
    bits[i] = at(kNextN) ^ at(kNextM) ^ (bit0[i] & mask);
  }
}

// Sets bit `bit` of the words, which is 0, to `bits` from the `first`th on.
TORCHEXT_SIMD_CLONES
void writeBit(const std::uint64_t* bits, std::size_t first, std::size_t bit, std::uint32_t* words) {
  constexpr std::size_t kHalfBits = kWordBits / 2;
  for (std::size_t i = 0; i < kN; i += kHalfBits) {
    const std::size_t word = (first + i) / kWordBits, shift = (first + i) % kWordBits;
    const auto half = static_cast<std::uint32_t>(bits[word] >> shift | bits[word + 1] << (kWordBits - shift));
    for (std::uint32_t k = 0; k < kHalfBits; ++k) {
      words[i + k] |= ((half >> k) & 1U) << bit;
    }
  }
}

// Returns the block of words 1 to kN, given bit 0 of the words from word 0 on.
Words wordsOf(const Polynomial& bit0) {
  constexpr std::size_t kUpper = 31;
  std::array<std::uint32_t, kN + kWordBits> words{};
  Polynomial bits = bit0;
  writeBit(bits.data(), 1, 0, words.data());
  for (std::size_t bit = 1; bit <= kUpper; ++bit) {
    const std::size_t needed = kN + 2 + (kUpper - bit) * (kN - 1);
    shiftBit(bit0.data(), (needed + kWordBits - 1) / kWordBits, ((kA >> (bit - 1)) & 1U) != 0U, bits.data());
    writeBit(bits.data(), bit == kUpper ? 2 : 1, bit, words.data());
  }
  Words block;
  std::copy_n(words.begin(), kN, block.begin());
  return block;
}

// Every word after the seed block is a linear function of the state, so each bit of the words obeys the recurrence of
// the characteristic polynomial: the bit at distance n is a sum of bits in the next 32 blocks. That is computed for
// bit 0 of as many words as determine the other bits.
void jump(Words& x, const Polynomial& reversed_power) {
  Product ahead;
  readLowestBits(x, ahead);
  Polynomial bits;
  multiplyHankel(bits.size(), reversed_power.data(), ahead.data(), bits.data());
  x = wordsOf(bits);
}

void advanceBlocks(Words& x, std::uint64_t blocks, Recurs recurs) {
  if (blocks == 0) {
    return;
  }
  // The first word of a seed block does not follow the recurrence, so compute one block before any jump.
  mt19937::nextBlock(x.data());
  const std::uint64_t left = blocks - 1;
  if (left >= kJumpPaysFrom && recurs == Recurs::kYes) {
    jump(x, *reversedPower(left * kN - 1));
    return;
  }
  const std::uint64_t steps = left / kJumpPaysFrom;
  for (std::size_t i = 0; steps >> i != 0; ++i) {
    if ((steps >> i & 1U) != 0) {
      jump(x, *reversedStep(i));
    }
  }
  mt19937::nextBlocks(x.data(), left % kJumpPaysFrom);
}

}  // namespace

void advance(at::mt19937_data_pod& state, std::uint64_t draws, Recurs recurs) {
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
  advanceBlocks(state.state_, blocks, recurs);
  const std::uint64_t place = taken - blocks * kN;  // 1 to 624
  state.next_ = static_cast<std::uint32_t>(place);
  state.left_ = static_cast<int>(kN + 1 - place);
}

}  // namespace torchext
