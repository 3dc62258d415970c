#include "transforms.h"

namespace torchext {

const Kernels* kernelsFor(c10::ScalarType dtype) {
  static const KindOfLanes* const lanes = avx512Lanes() != nullptr ? avx512Lanes() : avx2Lanes();
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
