#include "transforms.h"

#include <array>

namespace torchext {

namespace {

// In the order of preference.
constexpr std::array<const KindOfLanes* (*)(), 2> kKinds{avx512Lanes, avx2Lanes};

const KindOfLanes* bestKind() {
  for (const auto kind : kKinds) {
    if (const KindOfLanes* lanes = kind()) {
      return lanes;
    }
  }
  return nullptr;
}

}  // namespace

const Kernels* kernelsFor(c10::ScalarType dtype) {
  static const KindOfLanes* const lanes = bestKind();
  if (lanes == nullptr) {
    return nullptr;
  }
  switch (dtype) {
    case c10::kFloat:
      return &lanes->of_float;
    case c10::kBFloat16:
      return &lanes->of_bfloat16;
    case c10::kHalf:
      return &lanes->of_half;
    default:
      return nullptr;
  }
}

}  // namespace torchext
