#pragma once

// Numbers of 32 bits that instructions treat alike, and the arithmetic of random fills over them: NOTE [Fill kernels],
// transforms.h. Include it only where those instructions are enabled for the compiler.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../support/sizes.h"
#include "random_fill.h"
#include "transforms.h"

namespace torchext {

namespace {

// ---- Lanes ----

// Vectors of the compiler: GCC and Clang define operators for them. `Width` has the types, the number of lanes, and the
// instructions without an operator.
//
// Masks are vectors of lanes with all bits set or none, as comparisons return. The compiler keeps them in mask
// registers where that is better.
template <typename Width>
struct Lanes : Width {
  using Floats = typename Width::Floats;
  using Ints = typename Width::Ints;
  using Shorts = typename Width::Shorts;
  using Width::kCount;

  static Floats all(float x) {
    return x - Floats{};
  }
  static Ints all(std::int32_t x) {
    return x - Ints{};
  }

  template <int kBits>
  static Ints right(Ints a) {
    return reinterpret_cast<Ints>(reinterpret_cast<typename Width::Bits>(a) >> kBits);
  }

  static Floats valueOf(Ints a) {
    return __builtin_convertvector(a, Floats);
  }
  static Ints truncated(Floats a) {
    return __builtin_convertvector(a, Ints);
  }
  static Ints bitsOf(Floats a) {
    return reinterpret_cast<Ints>(a);
  }
  static Floats ofBits(Ints a) {
    return reinterpret_cast<Floats>(a);
  }

  // The nearest numbers of half precision; ties to even.
  static Floats throughHalf(Floats a) {
    return Width::ofHalves(Width::halvesOf(a));
  }

  static Ints load(const std::uint32_t* from) {
    return loadAs<Ints>(from);
  }
  static Floats load(const float* from) {
    return loadAs<Floats>(from);
  }
  static Floats load(const c10::BFloat16* from) {
    return ofBits(Width::widened(loadAs<Shorts>(from)) << 16);
  }
  static Floats load(const c10::Half* from) {
    return Width::ofHalves(loadAs<Shorts>(from));
  }

  // For values that the elements can represent.
  static void store(float* to, Floats a) {
    std::memcpy(to, &a, sizeof a);
  }
  static void store(c10::BFloat16* to, Floats a) {
    storeShorts(to, __builtin_convertvector(right<16>(bitsOf(a)), Shorts));
  }
  static void store(c10::Half* to, Floats a) {
    storeShorts(to, Width::halvesOf(a));
  }
  // Stores half of the lanes to each.
  template <typename Element>
  static void storeHalves(Element* first, Element* second, Floats a) {
    if constexpr (std::is_same_v<Element, float>) {
      Width::storeFloats(first, second, a);
    } else {
      Element values[kCount];  // NOLINT(*-c-arrays): no functions of the standard library here
      store(values, a);
      std::memcpy(first, values, sizeof values / 2);
      std::memcpy(second, values + kCount / 2, sizeof values / 2);
    }
  }

 private:
  template <typename Vector>
  static Vector loadAs(const void* from) {
    Vector a;
    std::memcpy(&a, from, sizeof a);
    return a;
  }
  static void storeShorts(void* to, Shorts a) {
    std::memcpy(to, &a, sizeof a);
  }
};

// ---- Uniform values ----

// Values in [0, 1), from the low 24 bits of random numbers.
template <typename Lanes>
auto unitValues(typename Lanes::Ints numbers) {
  return Lanes::valueOf(numbers & Lanes::all(0xffffff)) * Lanes::all(0x1p-24F);
}

// Rounds to values of the element type; ties to even. No value may be NaN.
template <typename Lanes, typename Element>
auto roundedTo(typename Lanes::Floats a) {
  using L = Lanes;
  if constexpr (std::is_same_v<Element, c10::BFloat16>) {
    const auto bits = L::bitsOf(a);
    const auto is_odd = L::template right<16>(bits) & L::all(1);
    const auto up = bits + L::all(0x7fff) + is_odd;
    return L::ofBits(L::template right<16>(up) << 16);
  } else if constexpr (std::is_same_v<Element, c10::Half>) {
    return L::throughHalf(a);
  } else {
    return a;
  }
}

template <typename Lanes, typename Element>
struct UniformRange {
  using Floats = decltype(Lanes::all(0.0F));

  Floats from;
  Floats width;
  Floats to_rounded;
  Floats from_rounded;

  UniformRange(float from_, float to_)
      : from{Lanes::all(from_)},
        width{Lanes::all(to_ - from_)},
        to_rounded{Lanes::all(static_cast<float>(static_cast<Element>(to_)))},
        from_rounded{Lanes::all(static_cast<float>(static_cast<Element>(from_)))} {}

  // The range excludes its end, but values may have been rounded to it.
  Floats values(const std::uint32_t* numbers) const {
    const auto value = Lanes::timesPlus(unitValues<Lanes>(Lanes::load(numbers)), width, from);
    const auto rounded = roundedTo<Lanes, Element>(value);
    return rounded == to_rounded ? from_rounded : rounded;
  }
};

template <typename Lanes, typename Element>
void uniformValues(const std::uint32_t* numbers, void* values, std::int64_t count, float from, float to) {
  const UniformRange<Lanes, Element> range{from, to};
  auto* out = static_cast<Element*>(values);
  std::int64_t i = 0;
  for (; i + Lanes::kCount <= count; i += Lanes::kCount) {
    Lanes::store(out + i, range.values(numbers + i));
  }
  if (i < count) {
    std::uint32_t last_numbers[Lanes::kCount] = {};  // NOLINT(*-c-arrays): no functions of the standard library here
    Element last_values[Lanes::kCount];              // NOLINT(*-c-arrays)
    const auto left = toSize(count - i);
    std::memcpy(last_numbers, numbers + i, left * sizeof(std::uint32_t));
    Lanes::store(last_values, range.values(last_numbers));
    std::memcpy(out + i, last_values, left * sizeof(Element));
  }
}

// ---- Normal values, by the Box-Muller transform ----

// The logarithm, sine and cosine are those of Moshier's Cephes library for single precision: its polynomials and its
// argument reductions. The same steps are fused as in PyTorch's kernel for AVX2.

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

// ---- Values out of bounds ----

template <typename Lanes, typename Element>
void valuesOutside(const void* values, std::int64_t count, float low, float high, std::uint16_t* masks) {
  using L = Lanes;
  const auto lows = L::all(low);
  const auto highs = L::all(high);
  const auto* from = static_cast<const Element*>(values);
  for (std::int64_t i = 0; i < count; i += kNormalChunk) {
    std::uint32_t mask = 0;
    for (std::int64_t j = 0; j < kNormalChunk; j += L::kCount) {
      const auto value = L::load(from + i + j);
      mask |= L::bitsOfMask((value < lows) | (highs < value)) << j;
    }
    masks[i / kNormalChunk] = static_cast<std::uint16_t>(mask);
  }
}

// ---- All kernels ----

template <typename Width, typename Element>
constexpr Kernels kKernels{uniformValues<Lanes<Width>, Element>, normalValues<Lanes<Width>, Element>,
                           valuesOutside<Lanes<Width>, Element>};

template <typename Width>
constexpr KindOfLanes kKindOfLanes{kKernels<Width, float>, kKernels<Width, c10::BFloat16>, kKernels<Width, c10::Half>};

}  // namespace

}  // namespace torchext
