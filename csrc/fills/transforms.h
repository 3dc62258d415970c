#pragma once

// NOTE [Kernels of our own]
//
// What PyTorch's kernels for random fills compute is fixed to the last bit: which random number a value is made of, by
// which polynomials, and where the compiler has fused a multiplication with an addition. So it can be computed
// otherwise, several times faster: many random numbers at once, and values of them while they are in a register.
//
// None of that is promised by PyTorch. Whether it holds for the PyTorch, the compiler and the processor at hand is
// found out once by comparing (exactness.h); where it does not, PyTorch's own kernel runs.
//
// The arithmetic (box_muller.h, uniform.h) is written over lanes: numbers that a processor's instructions treat alike.
// Each kind of lanes has a file that wraps its instructions (lanes_avx2.h), and a unit that compiles the arithmetic for
// it (transforms_avx2.cpp); a list in transforms.cpp has them all. Every fused operation is an explicit one, and no
// product that has been rounded is an operand of a plain addition, so that a compiler finds nothing to fuse.

#include <cstdint>

#include <c10/core/ScalarType.h>

#include "random_fill.h"

namespace torchext {

// Makes `count` values of as many random numbers. `first` and `second` are the parameters of the fill. For
// Distribution::Normal, `count` is a multiple of kNormalChunk.
using Transform = void (*)(const std::uint32_t* numbers, void* values, std::int64_t count, float first, float second);

// Tells which values are less than `low` or greater than `high`: bit i of each mask is that of value i of the next
// kNormalChunk values. `count` is a multiple of kNormalChunk.
using Scan = void (*)(const void* values, std::int64_t count, float low, float high, std::uint16_t* masks);

// What one kind of lanes does for elements of one dtype.
struct Kernels {
  Transform uniform;
  Transform normal;
  Scan outside;

  Transform transform(Distribution distribution) const {
    return distribution == Distribution::Normal ? normal : uniform;
  }
};

// What one kind of lanes does.
struct KindOfLanes {
  Kernels of_float;
  Kernels of_bfloat16;
  Kernels of_half;
};

// The kernels for this processor, or null.
const Kernels* kernelsFor(c10::ScalarType dtype);

}  // namespace torchext
