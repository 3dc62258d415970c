#include "transforms.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cpuid.h>
#include <immintrin.h>

#include "../support/sizes.h"

// The following code is compiled for these processors, independent of the target of the rest. Other headers are
// included above, because the linker may keep their functions for all units.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "lanes.h"

namespace torchext {

namespace {

// Eight lanes of AVX2.
struct Avx2 {
  static constexpr std::int64_t kCount = 8;

  using Floats = __m256;
  using Ints = std::int32_t __attribute__((vector_size(32)));
  using Bits = std::uint32_t __attribute__((vector_size(32)));
  using Shorts = std::uint16_t __attribute__((vector_size(16)));

  static Floats root(Floats a) {
    return _mm256_sqrt_ps(a);
  }
  // a * b + c, a * b - c and c - a * b, rounded once.
  static Floats timesPlus(Floats a, Floats b, Floats c) {
    return _mm256_fmadd_ps(a, b, c);
  }
  static Floats timesMinus(Floats a, Floats b, Floats c) {
    return _mm256_fmsub_ps(a, b, c);
  }
  static Floats minusTimes(Floats a, Floats b, Floats c) {
    return _mm256_fnmadd_ps(a, b, c);
  }

  // One bit per lane.
  static std::uint32_t bitsOfMask(Ints mask) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(reinterpret_cast<Floats>(mask)));
  }

  // GCC divides a conversion by `__builtin_convertvector()` in two.
  static Ints widened(Shorts a) {
    return reinterpret_cast<Ints>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(a)));
  }
  static Floats ofHalves(Shorts a) {
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(a));
  }
  static Shorts halvesOf(Floats a) {
    return reinterpret_cast<Shorts>(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace

}  // namespace torchext

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace torchext {

namespace {

// `__builtin_cpu_supports()` supports F16C only since GCC 11.
bool hasF16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & static_cast<unsigned>(bit_F16C)) != 0;
}

bool isSupported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && hasF16c();
}

}  // namespace

const KindOfLanes* avx2Lanes() {
  return isSupported() ? &kKindOfLanes<Avx2> : nullptr;
}

}  // namespace torchext

#else

namespace torchext {

const KindOfLanes* avx2Lanes() {
  return nullptr;
}

}  // namespace torchext

#endif
