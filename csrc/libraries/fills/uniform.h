#pragma once

// Uniform values over lanes (NOTE [Fill kernels], transforms.h). Include it only where lanes are defined.

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../support/sizes.h"

namespace torchext {

namespace {

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

}  // namespace

}  // namespace torchext
