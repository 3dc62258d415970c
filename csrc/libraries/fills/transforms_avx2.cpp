#include "transforms.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <array>
#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <cpuid.h>
#include <immintrin.h>

// The following code is compiled for these processors, independent of the target of the rest. Other headers are
// included above, because the linker may keep their functions for all units.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#include "box_muller.h"
#include "lanes.h"
#include "lanes_avx2.h"
#include "outside.h"
#include "uniform.h"

namespace torchext {

namespace {

template <typename Element>
constexpr Kernels kKernels{uniformValues<Lanes<Avx2>, Element>, normalValues<Lanes<Avx2>, Element>,
                           valuesOutside<Lanes<Avx2>, Element>};

}  // namespace

}  // namespace torchext

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace torchext {

namespace {

// `__builtin_cpu_supports()` supports F16C only since GCC 11.
bool hasF16c() {
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & static_cast<unsigned>(bit_F16C)) != 0;
}

bool isSupported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && hasF16c();
}

}  // namespace

const KindOfLanes* avx2Lanes() {
  static constexpr KindOfLanes kLanes{kKernels<float>, kKernels<c10::BFloat16>, kKernels<c10::Half>};
  return isSupported() ? &kLanes : nullptr;
}

}  // namespace torchext

#else

namespace torchext {

const KindOfLanes* avx2Lanes() {
  return nullptr;
}

}  // namespace torchext

#endif
