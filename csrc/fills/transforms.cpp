#include "transforms.h"

#include <array>

#include "transforms_avx2.h"
#include "transforms_avx512.h"

namespace torchext {

namespace {

// The best ones first.
constexpr std::array<const Kernels* (*)(c10::ScalarType), 2> kKinds{avx512KernelsFor, avx2KernelsFor};

}  // namespace

const Kernels* kernelsFor(c10::ScalarType dtype) {
  for (const auto kind : kKinds) {
    if (const Kernels* kernels = kind(dtype)) {
      return kernels;
    }
  }
  return nullptr;
}

}  // namespace torchext
