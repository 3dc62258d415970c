#include "twister.h"

#include <algorithm>
#include <cstddef>

#include "../support/sizes.h"
#include "mt19937.h"

namespace torchext {

namespace {

constexpr int kWords = static_cast<int>(mt19937::kN);

}  // namespace

// `at::mt19937` counts down in `left_`: 624 after the first word of a block, 1 after the last. A new seed is a block
// whose words are not used, so it also has 1 there, and 0 in `next_`.
bool canDrawFrom(const at::mt19937_data_pod& engine) {
  if (!engine.seeded_ || engine.left_ < 1 || engine.left_ > kWords) {
    return false;
  }
  const bool is_new = engine.left_ == 1 && engine.next_ == 0;
  return is_new || engine.next_ == static_cast<std::uint32_t>(kWords + 1 - engine.left_);
}

void drawNumbers(at::mt19937_data_pod& engine, std::uint32_t* numbers, std::int64_t count) {
  while (count > 0) {
    if (engine.left_ == 1) {
      mt19937::nextBlock(engine.state_.data());
      engine.left_ = kWords + 1;
    }
    const int used = kWords + 1 - engine.left_;
    const int taken = static_cast<int>(std::min<std::int64_t>(count, kWords - used));
    mt19937::temper(engine.state_.data() + used, numbers, toSize(taken));
    engine.left_ -= taken;
    engine.next_ = static_cast<std::uint32_t>(used + taken);
    numbers += taken;
    count -= taken;
  }
}

bool areSame(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b) {
  return a.seed_ == b.seed_ && a.left_ == b.left_ && a.next_ == b.next_ && a.seeded_ == b.seeded_ &&
         a.state_ == b.state_;
}

}  // namespace torchext
