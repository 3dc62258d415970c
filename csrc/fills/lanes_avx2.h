#pragma once

// Eight lanes of AVX2. Include it only in transforms_avx2.cpp, which enables these instructions for the compiler.

#include <cstddef>
#include <cstdint>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

namespace torchext {

namespace {

struct LanesAvx2 {
  using Floats = __m256;
  using Ints = __m256i;

  static constexpr std::int64_t kCount = 8;

  static Floats all(float x) {
    return _mm256_set1_ps(x);
  }
  static Ints all(std::int32_t x) {
    return _mm256_set1_epi32(x);
  }
  static Ints load(const std::uint32_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));  // NOLINT(*-reinterpret-cast)
  }

  static Floats plus(Floats a, Floats b) {
    return _mm256_add_ps(a, b);
  }
  static Floats minus(Floats a, Floats b) {
    return _mm256_sub_ps(a, b);
  }
  static Floats times(Floats a, Floats b) {
    return _mm256_mul_ps(a, b);
  }
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

  static Ints plus(Ints a, Ints b) {
    return _mm256_add_epi32(a, b);
  }
  static Ints minus(Ints a, Ints b) {
    return _mm256_sub_epi32(a, b);
  }
  static Ints both(Ints a, Ints b) {
    return _mm256_and_si256(a, b);
  }
  static Ints either(Ints a, Ints b) {
    return _mm256_or_si256(a, b);
  }
  static Ints differing(Ints a, Ints b) {
    return _mm256_xor_si256(a, b);
  }
  template <int kBits>
  static Ints left(Ints a) {
    return _mm256_slli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints right(Ints a) {
    return _mm256_srli_epi32(a, kBits);
  }

  static Floats valueOf(Ints a) {
    return _mm256_cvtepi32_ps(a);
  }
  static Ints truncated(Floats a) {
    return _mm256_cvttps_epi32(a);
  }
  static Ints bitsOf(Floats a) {
    return _mm256_castps_si256(a);
  }
  static Floats ofBits(Ints a) {
    return _mm256_castsi256_ps(a);
  }

  // Masks have all bits of a lane set, or none.
  static Ints isLess(Floats a, Floats b) {
    return bitsOf(_mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static Ints isEqual(Floats a, Floats b) {
    return bitsOf(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
  }
  static Ints isEqual(Ints a, Ints b) {
    return _mm256_cmpeq_epi32(a, b);
  }
  static Floats choose(Ints mask, Floats where, Floats elsewhere) {
    return _mm256_blendv_ps(elsewhere, where, ofBits(mask));
  }

  // One bit per lane.
  static std::uint32_t bitsOfMask(Ints mask) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(ofBits(mask)));
  }

  // The nearest numbers of half precision; ties to even.
  static Floats throughHalf(Floats a) {
    return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }

  static Floats load(const float* from) {
    return _mm256_loadu_ps(from);
  }
  static Floats load(const c10::BFloat16* from) {
    return ofBits(left<16>(_mm256_cvtepu16_epi32(load16(from))));
  }
  static Floats load(const c10::Half* from) {
    return _mm256_cvtph_ps(load16(from));
  }

  // For values that the elements can represent.
  static void store(float* to, Floats a) {
    _mm256_storeu_ps(to, a);
  }
  static void store(c10::BFloat16* to, Floats a) {
    const __m256i halves = right<16>(bitsOf(a));
    const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);  // NOLINT(*-reinterpret-cast)
  }
  static void store(c10::Half* to, Floats a) {
    const __m128i packed = _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);  // NOLINT(*-reinterpret-cast)
  }

 private:
  // Eight elements of 16 bits.
  static __m128i load16(const void* from) {
    return _mm_loadu_si128(static_cast<const __m128i*>(from));
  }
};

}  // namespace

}  // namespace torchext
