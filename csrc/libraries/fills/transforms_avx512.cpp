#include "transforms.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <array>
#include <cstdint>
#include <cstring>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <immintrin.h>

#include "avx512.h"

// The following code is compiled for these processors, independent of the target of the rest. Other headers are
// included above, because the linker may keep their functions for all units.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
// GCC warns about intentionally uninitialized values in its own header (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#include "box_muller.h"
#include "lanes.h"
#include "lanes_avx512.h"
#include "outside.h"
#include "uniform.h"

namespace torchext {

namespace {

template <typename Element>
constexpr Kernels kKernels{uniformValues<Lanes<Avx512>, Element>, normalValues<Lanes<Avx512>, Element>,
                           valuesOutside<Lanes<Avx512>, Element>};

}  // namespace

}  // namespace torchext

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace torchext {

const KindOfLanes* avx512Lanes() {
  static constexpr KindOfLanes kLanes{kKernels<float>, kKernels<c10::BFloat16>, kKernels<c10::Half>};
  return hasAvx512() ? &kLanes : nullptr;
}

}  // namespace torchext

#else

namespace torchext {

const KindOfLanes* avx512Lanes() {
  return nullptr;
}

}  // namespace torchext

#endif
