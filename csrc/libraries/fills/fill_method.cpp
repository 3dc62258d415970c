#include "fill_method.h"

#include <cfloat>
#include <limits>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "exactness.h"
#include "own_fill.h"
#include "pytorch_fill.h"
#include "twister.h"

namespace torchext {

namespace {

double largestOf(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return FLT_MAX;
    case c10::kBFloat16:
      return static_cast<double>(std::numeric_limits<c10::BFloat16>::max());
    case c10::kHalf:
      return static_cast<double>(std::numeric_limits<c10::Half>::max());
    default:
      return DBL_MAX;
  }
}

// Also rejects NaN.
bool isRange(double from, double to, c10::ScalarType dtype) {
  const double largest = largestOf(dtype);
  const bool is_inside = -largest <= from && from <= to && to <= largest && to - from <= largest;
  if (!is_inside || dtype == c10::kDouble) {
    return is_inside;
  }
  // The kernel computes in single precision, where the width may be rounded up.
  return static_cast<float>(to) - static_cast<float>(from) <= FLT_MAX;
}

bool isAccepted(const RandomFill& fill, std::int64_t count) {
  if (fill.distribution == Distribution::Uniform) {
    return isRange(fill.first, fill.second, fill.dtype);
  }
  return fill.second >= 0 && count >= kNormalChunk;
}

}  // namespace

FillMethod fillMethodFor(const RandomFill& fill, std::int64_t count, const at::mt19937_data_pod& engine) {
  if (!canDrawFrom(engine) || !isAccepted(fill, count) || !arePiecesExact(fill.distribution, fill.dtype)) {
    return nullptr;
  }
  return hasOwnKernel(fill) && isOwnKernelExact(fill.distribution, fill.dtype) ? fillByOwnKernel : fillByPyTorch;
}

}  // namespace torchext
