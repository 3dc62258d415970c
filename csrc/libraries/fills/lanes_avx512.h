#pragma once

// Sixteen lanes of AVX-512. Include it only in transforms_avx512.cpp, which enables these instructions for the
// compiler.

#include <cstdint>

#include <immintrin.h>

namespace torchext {

namespace {

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
