#include "fill_method.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstddef>
#include <limits>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/normal_ops.h>
#include <ATen/ops/uniform_ops.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../support/included_key.h"
#include "exactness.h"
#include "random_fill.h"
#include "transforms.h"
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

namespace {

constexpr std::int64_t kNumbers = 4096;  // fits in a first-level cache together with the values
static_assert(kNumbers % kNormalChunk == 0);

// A fill in progress: its position in memory and on the engine.
class OwnFill {
 public:
  OwnFill(const RandomFill& fill, void* values, at::mt19937_data_pod& engine)
      : fill_{fill},
        transform_{kernelsFor(fill.dtype)->transform(fill.distribution)},
        element_bytes_{static_cast<std::int64_t>(c10::elementSize(fill.dtype))},
        next_{static_cast<std::byte*>(values)},
        engine_{engine} {}

  void write(std::int64_t count) {
    while (count > 0) {
      const std::int64_t part = std::min(count, kNumbers);
      drawNumbers(engine_, numbers_.data(), part);
      transform_(numbers_.data(), next_, part, static_cast<float>(fill_.first), static_cast<float>(fill_.second));
      next_ += part * element_bytes_;
      count -= part;
    }
  }

  void stepBack(std::int64_t count) {
    next_ -= count * element_bytes_;
  }

  void draw(std::int64_t count) {
    drawNumbers(engine_, numbers_.data(), count);
  }

 private:
  const RandomFill& fill_;
  Transform transform_;
  std::int64_t element_bytes_;
  std::byte* next_;
  at::mt19937_data_pod& engine_;
  alignas(64) std::array<std::uint32_t, kNumbers> numbers_;
};

// If the last chunk is not whole, PyTorch computes the last 16 values again.
void writeNormals(OwnFill& own, const RandomFill& fill, std::int64_t count) {
  const std::int64_t rest = count % kNormalChunk;
  own.write(count - rest);
  if (rest > 0) {
    own.draw(drawsOfRest(fill.dtype, rest));
    own.stepBack(kNormalChunk - rest);
    own.write(kNormalChunk);
  }
}

}  // namespace

// A parameter that is infinite in single precision produces NaN values, whose bits may differ.
bool hasOwnKernel(const RandomFill& fill) {
  return std::abs(fill.first) <= FLT_MAX && std::abs(fill.second) <= FLT_MAX && kernelsFor(fill.dtype) != nullptr;
}

void fillByOwnKernel(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine) {
  OwnFill own{fill, values, engine};
  if (fill.distribution == Distribution::Normal) {
    writeNormals(own, fill, count);
  } else {
    own.write(count);
  }
}

void fillByPyTorch(const RandomFill& fill, void* values, std::int64_t count, at::mt19937_data_pod& engine) {
  const KernelsOnly guard;
  at::Tensor tensor = at::from_blob(values, {count}, at::dtype(fill.dtype));
  const at::Generator generator = at::detail::createCPUGenerator();
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937 own_engine;
  own_engine.set_data(engine);
  impl.set_engine(own_engine);
  // Calling an operator notifies the profiler, redispatching does not.
  if (fill.distribution == Distribution::Normal) {
    at::_ops::normal_::redispatch(KernelsOnly::kCpu, tensor, fill.first, fill.second, generator);
  } else {
    at::_ops::uniform_::redispatch(KernelsOnly::kCpu, tensor, fill.first, fill.second, generator);
  }
  engine = impl.engine().data();
}

}  // namespace torchext
