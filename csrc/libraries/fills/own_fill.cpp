#include "own_fill.h"

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstddef>

#include <c10/core/ScalarType.h>

#include "pieces.h"
#include "transforms.h"
#include "twister.h"

namespace torchext {

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

}  // namespace torchext
