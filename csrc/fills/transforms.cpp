#include "transforms.h"

#include <array>

#include "transforms_avx2.h"

namespace torchext {

namespace {

// The best ones first.
constexpr std::array<Transform (*)(Distribution, c10::ScalarType), 1> kKinds{avx2TransformFor};

}  // namespace

Transform transformFor(Distribution distribution, c10::ScalarType dtype) {
  for (const auto kind : kKinds) {
    if (const Transform transform = kind(distribution, dtype)) {
      return transform;
    }
  }
  return nullptr;
}

}  // namespace torchext
