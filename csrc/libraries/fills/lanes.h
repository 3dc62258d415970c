#pragma once

// Numbers of 32 bits that instructions treat alike, as vectors of the compiler: GCC and Clang define operators for
// them. `Width` has the types, the number of lanes, and the instructions without an operator. Include it only where
// those are enabled for the compiler.
//
// Masks are vectors of lanes with all bits set or none, as comparisons return. The compiler keeps them in mask
// registers where that is better.

#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace torchext {

namespace {

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

}  // namespace

}  // namespace torchext
