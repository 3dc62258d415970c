#pragma once

// Random fills of memory, by several threads, with the bits that one call of PyTorch's operator would have written
// (NOTE [Kernels of our own], transforms.h).

#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>
#include <c10/util/FunctionRef.h>
#include <torchext/macros.h>

#include "random_fill.h"

namespace torchext {

// Called for each stretch of values, from `begin` to before `end`, when these are final, on the thread that has filled
// them, while they are in its cache. Several threads call it at once. Each value is in one stretch. What it raises ends
// the fill, and is raised to the caller of `fillRandomly()`.
using AfterStretch = c10::function_ref<void(std::int64_t begin, std::int64_t end)>;

inline void doNothing(std::int64_t /*begin*/, std::int64_t /*end*/) {}

// Fills `count` neighbouring elements, as PyTorch's kernel for contiguous tensors on the CPU would with a generator
// whose engine is `engine`, and moves `engine` as that would. A large fill uses up to `at::get_num_threads()` threads,
// and only this one in a parallel region of PyTorch's. No generator is touched.
//
// Returns false, and has changed nothing, where the caller has to run the operator: for arguments that PyTorch refuses,
// normal fills of less than 16 elements, which draw differently, dtypes that no such fills are known of, and engines in
// a state that PyTorch would not leave them in. If an exception is raised, `engine` is as before, and the values are
// not.
TORCHEXT_API bool fillRandomly(const RandomFill& fill,
                               void* values,
                               std::int64_t count,
                               at::mt19937_data_pod& engine,
                               AfterStretch after = doNothing);

}  // namespace torchext
