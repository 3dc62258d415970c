#pragma once

// Sixteen lanes of AVX-512. Include it only in transforms_avx512.cpp, which enables these instructions for the
// compiler. Masks are vectors of lanes with all bits set or none, as for AVX2. The compiler keeps them in mask
// registers where that is better.

#include <cstddef>
#include <cstdint>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

namespace torchext {

namespace {

struct LanesAvx512 {
  using Floats = __m512;
  using Ints = __m512i;

  static constexpr std::int64_t kCount = 16;

  static Floats all(float x) {
    return _mm512_set1_ps(x);
  }
  static Ints all(std::int32_t x) {
    return _mm512_set1_epi32(x);
  }
  static Ints load(const std::uint32_t* from) {
    return _mm512_loadu_si512(from);
  }
  // Loads half of the lanes from each.
  static Ints load(const std::uint32_t* first, const std::uint32_t* second) {
    return _mm512_inserti32x8(_mm512_castsi256_si512(load8(first)), load8(second), 1);
  }

  static Floats plus(Floats a, Floats b) {
    return _mm512_add_ps(a, b);
  }
  static Floats minus(Floats a, Floats b) {
    return _mm512_sub_ps(a, b);
  }
  static Floats times(Floats a, Floats b) {
    return _mm512_mul_ps(a, b);
  }
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

  static Ints plus(Ints a, Ints b) {
    return _mm512_add_epi32(a, b);
  }
  static Ints minus(Ints a, Ints b) {
    return _mm512_sub_epi32(a, b);
  }
  static Ints both(Ints a, Ints b) {
    return _mm512_and_si512(a, b);
  }
  static Ints either(Ints a, Ints b) {
    return _mm512_or_si512(a, b);
  }
  static Ints differing(Ints a, Ints b) {
    return _mm512_xor_si512(a, b);
  }
  template <int kBits>
  static Ints left(Ints a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  static Ints right(Ints a) {
    return _mm512_srli_epi32(a, kBits);
  }

  static Floats valueOf(Ints a) {
    return _mm512_cvtepi32_ps(a);
  }
  static Ints truncated(Floats a) {
    return _mm512_cvttps_epi32(a);
  }
  static Ints bitsOf(Floats a) {
    return _mm512_castps_si512(a);
  }
  static Floats ofBits(Ints a) {
    return _mm512_castsi512_ps(a);
  }

  static Ints isLess(Floats a, Floats b) {
    return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ));
  }
  static Ints isEqual(Floats a, Floats b) {
    return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ));
  }
  static Ints isEqual(Ints a, Ints b) {
    return _mm512_movm_epi32(_mm512_cmpeq_epi32_mask(a, b));
  }
  static Floats choose(Ints mask, Floats where, Floats elsewhere) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(mask), elsewhere, where);
  }
  // One bit per lane.
  static std::uint32_t bitsOfMask(Ints mask) {
    return _mm512_movepi32_mask(mask);
  }

  // The nearest numbers of half precision; ties to even.
  static Floats throughHalf(Floats a) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }

  static Floats load(const float* from) {
    return _mm512_loadu_ps(from);
  }
  static Floats load(const c10::BFloat16* from) {
    return ofBits(left<16>(_mm512_cvtepu16_epi32(load8(from))));
  }
  static Floats load(const c10::Half* from) {
    return _mm512_cvtph_ps(load8(from));
  }

  // For values that the elements can represent.
  static void store(float* to, Floats a) {
    _mm512_storeu_ps(to, a);
  }
  static void store(c10::BFloat16* to, Floats a) {
    store8(to, _mm512_cvtepi32_epi16(right<16>(bitsOf(a))));
  }
  static void store(c10::Half* to, Floats a) {
    store8(to, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }

  // Stores half of the lanes to each.
  static void store(float* first, float* second, Floats a) {
    _mm256_storeu_ps(first, _mm512_castps512_ps256(a));
    _mm256_storeu_ps(second, _mm512_extractf32x8_ps(a, 1));
  }
  template <typename Element>
  static void store(Element* first, Element* second, Floats a) {
    Element values[kCount];  // NOLINT(*-c-arrays): no functions of the standard library here
    store(values, a);
    store4(first, values);
    store4(second, values + kCount / 2);
  }

 private:
  // 32 bytes.
  static __m256i load8(const void* from) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(from));
  }
  static void store8(void* to, __m256i a) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), a);
  }
  // 16 bytes.
  static void store4(void* to, const void* from) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
};

}  // namespace

}  // namespace torchext
