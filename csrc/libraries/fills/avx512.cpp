#include "mt19937.h"
#include "transforms.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <ATen/Version.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#include "../support/sizes.h"

// The following code is compiled for these processors, independent of the target of the rest. Other headers are
// included above, because the linker may keep their functions for all units.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
// GCC warns about intentionally uninitialized values in its own header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "lanes.h"

namespace torchext {

namespace {

// Sixteen lanes of AVX-512.
struct Avx512 {
  static constexpr std::int64_t kCount = 16;

  using Floats = __m512;
  using Ints = std::int32_t __attribute__((vector_size(64)));
  using Bits = std::uint32_t __attribute__((vector_size(64)));
  using Shorts = std::uint16_t __attribute__((vector_size(32)));

  static Floats root(Floats a) {
    return _mm512_sqrt_ps(a);
  }
  // a * b + c, a * b - c and c - a * b, rounded once.
  static Floats timesPlus(Floats a, Floats b, Floats c) {
    return _mm512_fmadd_ps(a, b, c);
  }
  static Floats timesMinus(Floats a, Floats b, Floats c) {
    return _mm512_fmsub_ps(a, b, c);
  }
  static Floats minusTimes(Floats a, Floats b, Floats c) {
    return _mm512_fnmadd_ps(a, b, c);
  }

  // One bit per lane.
  static std::uint32_t bitsOfMask(Ints mask) {
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
  }

  // GCC divides a conversion by `__builtin_convertvector()` in two.
  static Ints widened(Shorts a) {
    return reinterpret_cast<Ints>(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(a)));
  }
  static Floats ofHalves(Shorts a) {
    return _mm512_cvtph_ps(reinterpret_cast<__m256i>(a));
  }
  static Shorts halvesOf(Floats a) {
    return reinterpret_cast<Shorts>(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }

  // Loads half of the lanes from each.
  static Ints loadHalves(const std::uint32_t* first, const std::uint32_t* second) {
    return reinterpret_cast<Ints>(_mm512_inserti32x8(_mm512_castsi256_si512(load8(first)), load8(second), 1));
  }
  static void storeFloats(float* first, float* second, Floats a) {
    _mm256_storeu_ps(first, _mm512_castps512_ps256(a));
    _mm256_storeu_ps(second, _mm512_extractf32x8_ps(a, 1));
  }

 private:
  static __m256i load8(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
};

}  // namespace

}  // namespace torchext

namespace torchext::mt19937 {

namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kVectors = kN / kLanes;
// Word j of a new block needs word j + kM of the old one or, past its end, word j + kM - kN of the new one. One vector
// has words of both.
constexpr std::size_t kFromNew = (kN - kM) / kLanes;
constexpr int kShift = static_cast<int>(kM % kLanes);
static_assert(kN % kLanes == 0 && (kFromNew + 1) * kLanes > kN - kM);

inline __m512i load(const std::uint32_t* from) {
  return _mm512_loadu_si512(from);
}

// `low` and `high` are adjacent.
template <int kFirst>
inline __m512i between(__m512i low, __m512i high) {
  return _mm512_alignr_epi32(high, low, kFirst);
}

inline __m512i next(__m512i words, __m512i following, __m512i far) {
  constexpr int kSelect = 0xCA;  // for each bit, the first operand selects one of the others
  const __m512i lower = _mm512_set1_epi32(0x7fffffff);
  const __m512i mixed = _mm512_ternarylogic_epi32(lower, following, words, kSelect);
  const __mmask16 odd = _mm512_test_epi32_mask(following, _mm512_set1_epi32(1));
  const __m512i sum = _mm512_xor_si512(far, _mm512_srli_epi32(mixed, 1));
  return _mm512_mask_xor_epi32(sum, odd, sum, _mm512_set1_epi32(static_cast<int>(kA)));
}

// Reads new words as they were written, in whole vectors, and moves them in registers: a load across two stores would
// wait until both are in the cache.
void moveOn(std::uint32_t* x) {
  const auto vector = [x](std::size_t i) { return x + i * kLanes; };
  __m512i low = load(vector(kVectors - 1 - kFromNew));
  for (std::size_t i = 0; i < kFromNew; ++i) {
    const __m512i high = load(vector(kVectors - kFromNew + i));
    const __m512i words = next(load(vector(i)), load(vector(i) + 1), between<kShift>(low, high));
    _mm512_storeu_si512(vector(i), words);
    low = high;
  }
  for (std::size_t i = kFromNew; i + 1 < kVectors; ++i) {
    const __m512i high = load(vector(i - kFromNew));
    const __m512i words = next(load(vector(i)), load(vector(i) + 1), between<kShift>(low, high));
    _mm512_storeu_si512(vector(i), words);
    low = high;
  }
  const __m512i last = load(vector(kVectors - 1));
  const __m512i high = load(vector(kVectors - 1 - kFromNew));
  _mm512_storeu_si512(vector(kVectors - 1), next(last, between<1>(last, load(x)), between<kShift>(low, high)));
}

}  // namespace

// Vectors that span two cache lines take twice as long, and PyTorch aligns a state only to its words.
void nextBlocksByAvx512(std::uint32_t* state, std::size_t count) {
  constexpr std::size_t kWorthACopy = 8;
  if (count < kWorthACopy) {
    for (std::size_t i = 0; i < count; ++i) {
      moveOn(state);
    }
    return;
  }
  alignas(64) std::array<std::uint32_t, kN> words;
  std::memcpy(words.data(), state, sizeof(words));
  for (std::size_t i = 0; i < count; ++i) {
    moveOn(words.data());
  }
  std::memcpy(state, words.data(), sizeof(words));
}

}  // namespace torchext::mt19937

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace torchext {

bool hasAvx512() {
  return at::get_cpu_capability() == "AVX512" && __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

const KindOfLanes* avx512Lanes() {
  return hasAvx512() ? &kKindOfLanes<Avx512> : nullptr;
}

}  // namespace torchext

#else

#include <c10/util/Exception.h>

namespace torchext {

bool hasAvx512() {
  return false;
}

const KindOfLanes* avx512Lanes() {
  return nullptr;
}

}  // namespace torchext

void torchext::mt19937::nextBlocksByAvx512(std::uint32_t* /*state*/, std::size_t /*count*/) {
  TORCH_INTERNAL_ASSERT(false, "Compiled without AVX-512.");
}

#endif
