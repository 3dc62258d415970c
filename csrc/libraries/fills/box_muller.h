#pragma once

// Normal values over lanes, by the Box-Muller transform (NOTE [Fill kernels], transforms.h). Include it only
// where lanes are defined.
//
// The logarithm, sine and cosine are those of Moshier's Cephes library for single precision: its polynomials and its
// argument reductions. The same steps are fused as in PyTorch's kernel for AVX2.

#include <cstdint>

#include "random_fill.h"
#include "uniform.h"

namespace torchext {

namespace {

// The natural logarithm of numbers that are positive, not denormal and not infinite.
template <typename Lanes>
auto logarithm(typename Lanes::Floats x) {
  using L = Lanes;
  // x = m * 2^e for m in [sqrt(1/2), sqrt(2)); the polynomial is in m - 1.
  const auto bits = L::bitsOf(x);
  const auto half = L::all(0.5F);
  const auto one = L::all(1.0F);
  const auto m = L::ofBits((bits & L::all(0x007fffff)) | L::bitsOf(half));  // in [1/2, 1)
  const auto is_small = m < L::all(0.707106781186547524F);
  const auto ifSmall = [&](auto number) { return L::ofBits(is_small & L::bitsOf(number)); };
  const auto e = L::valueOf(L::template right<23>(bits) - L::all(126)) - ifSmall(one);
  const auto f = m - one + ifSmall(m);

  const auto f2 = f * f;
  auto p = L::all(7.0376836292E-2F);
  p = L::timesPlus(p, f, L::all(-1.1514610310E-1F));
  p = L::timesPlus(p, f, L::all(1.1676998740E-1F));
  p = L::timesPlus(p, f, L::all(-1.2420140846E-1F));
  p = L::timesPlus(p, f, L::all(1.4249322787E-1F));
  p = L::timesPlus(p, f, L::all(-1.6668057665E-1F));
  p = L::timesPlus(p, f, L::all(2.0000714765E-1F));
  p = L::timesPlus(p, f, L::all(-2.4999993993E-1F));
  p = L::timesPlus(p, f, L::all(3.3333331174E-1F));
  p = p * f;
  // e * log(2) in two parts; the larger one has few digits.
  p = L::timesPlus(p, f2, e * L::all(-2.12194440E-4F));
  p = L::minusTimes(f2, half, p);
  return L::timesPlus(e, L::all(0.693359375F), f + p);
}

template <typename Lanes>
struct SineAndCosine {
  using Floats = decltype(Lanes::all(0.0F));

  Floats sine;
  Floats cosine;
};

// For angles that are not negative and not large.
template <typename Lanes>
auto sineAndCosine(typename Lanes::Floats angle) {
  using L = Lanes;
  // Pairs of octants around a multiple of pi/2, which is subtracted in three parts of few digits each.
  auto octant = L::truncated(angle * L::all(1.27323954473516F));
  octant = (octant + L::all(1)) & L::all(-2);  // even
  const auto y = L::valueOf(octant);
  auto x = L::timesPlus(y, L::all(-0.78515625F), angle);
  x = L::timesPlus(y, L::all(-2.4187564849853515625E-4F), x);
  x = L::timesPlus(y, L::all(-3.77489497744594108E-8F), x);

  const auto x2 = x * x;
  auto c = L::all(2.443315711809948E-5F);
  c = L::timesPlus(c, x2, L::all(-1.388731625493765E-3F));
  c = L::timesPlus(c, x2, L::all(4.166664568298827E-2F));
  c = c * x2;
  c = L::timesMinus(c, x2, x2 * L::all(0.5F)) + L::all(1.0F);

  auto s = L::all(-1.9515295891E-4F);
  s = L::timesPlus(s, x2, L::all(8.3321608736E-3F));
  s = L::timesPlus(s, x2, L::all(-1.6666654611E-1F));
  s = s * x2;
  s = L::timesPlus(s, x, x);

  // After two octants a sine is a cosine; after four, both change their signs.
  const auto four = L::all(4);
  const auto is_sine = (octant & L::all(2)) == L::all(0);
  const auto sine_sign = (octant & four) << 29;
  const auto cosine_sign = ((octant + L::all(2)) & four) << 29;
  const auto signedBy = [](auto sign, auto number) { return L::ofBits(sign ^ L::bitsOf(number)); };
  return SineAndCosine<L>{signedBy(sine_sign, is_sine ? s : c), signedBy(cosine_sign, is_sine ? c : s)};
}

// Computes the values of chunks of numbers: of one chunk at a time if it has twice as many numbers as lanes, otherwise
// of two. A single remaining chunk is computed twice.
template <typename Lanes, typename Element>
void normalValues(const std::uint32_t* numbers, void* values, std::int64_t count, float mean, float std) {
  using L = Lanes;
  constexpr std::int64_t kHalf = kNormalChunk / 2;
  constexpr bool kTwo = L::kCount == kNormalChunk;
  static_assert(kTwo || L::kCount == kHalf);
  const auto means = L::all(mean);
  const auto stds = L::all(std);
  auto* out = static_cast<Element*>(values);
  constexpr std::int64_t kStep = kTwo ? 2 * kNormalChunk : kNormalChunk;
  for (std::int64_t i = 0; i < count; i += kStep) {
    const std::int64_t second = i + kNormalChunk < count ? i + kNormalChunk : i;
    const auto load = [&](std::int64_t half) {
      if constexpr (kTwo) {
        return L::loadHalves(numbers + i + half, numbers + second + half);
      } else {
        return L::load(numbers + i + half);
      }
    };
    const auto store = [&](std::int64_t half, auto normal) {
      const auto value = roundedTo<L, Element>(L::timesPlus(normal, stds, means));
      if constexpr (kTwo) {
        L::storeHalves(out + i + half, out + second + half, value);
      } else {
        L::store(out + i + half, value);
      }
    };
    const auto u1 = L::all(1.0F) - unitValues<L>(load(0));
    const auto u2 = unitValues<L>(load(kHalf));
    const auto radius = L::root(L::all(-2.0F) * logarithm<L>(u1));
    const auto angle = sineAndCosine<L>(L::all(6.283185307179586F) * u2);
    store(0, radius * angle.cosine);
    store(kHalf, radius * angle.sine);
  }
}

}  // namespace

}  // namespace torchext
