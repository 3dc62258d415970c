#include "hankel_product.h"

#include <array>

#include <ATen/Version.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace torchext {

namespace {

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

}  // namespace

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

}  // namespace torchext
