#pragma once

// NOTE [Fill kernels]
//
// The results of PyTorch kernels for random fills are fixed to the last bit: by the random number of each value, the
// polynomials, and the multiplications that the compiler has fused with additions. So another implementation can
// compute them several times faster: many random numbers at once, transformed while they are in registers.
//
// PyTorch does not promise any of that. A comparison (fill_method.h) determines once whether it holds for the installed
// PyTorch, compiler and processor. Otherwise PyTorch's kernel runs.
//
// The arithmetic (lanes.h) is written over lanes: numbers that a processor's instructions treat alike. Each kind of
// lanes has a file that wraps its instructions and compiles the arithmetic for them (avx2.cpp). Every fused operation
// is explicit, and no rounded product is an operand of a plain addition, so that a compiler finds nothing to fuse.

#include <cstdint>

#include <c10/core/ScalarType.h>

#include "random_fill.h"

namespace torchext {

// Computes `count` values from as many random numbers. `first` and `second` are the parameters of the fill. For
// Distribution::Normal, `count` must be a multiple of kNormalChunk.
using Transform = void (*)(const std::uint32_t* numbers, void* values, std::int64_t count, float first, float second);

// Finds the values that are less than `low` or greater than `high`: bit i of each mask stands for value i of the next
// kNormalChunk values. `count` must be a multiple of kNormalChunk.
using Scan = void (*)(const void* values, std::int64_t count, float low, float high, std::uint16_t* masks);

// The kernels of one kind of lanes for one dtype.
struct Kernels {
  Transform uniform;
  Transform normal;
  Scan outside;

  Transform transform(Distribution distribution) const {
    return distribution == Distribution::Normal ? normal : uniform;
  }
};

// The kernels of one kind of lanes.
struct KindOfLanes {
  Kernels of_float;
  Kernels of_bfloat16;
  Kernels of_half;
};

// Return the kernels for processors with AVX2, FMA and F16C, or with the AVX-512 of servers since 2017 if PyTorch uses
// it. Null on other processors.
const KindOfLanes* avx2Lanes();
const KindOfLanes* avx512Lanes();

// Returns the kernels for this processor, or null.
const Kernels* kernelsFor(c10::ScalarType dtype);

}  // namespace torchext
