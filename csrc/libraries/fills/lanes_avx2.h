#pragma once

// Eight lanes of AVX2. Include it only in transforms_avx2.cpp, which enables these instructions for the compiler.

#include <cstdint>

#include <immintrin.h>

namespace torchext {

namespace {

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
