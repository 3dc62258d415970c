#include "mt19937.h"

#include <algorithm>

#include "../support/sizes.h"

namespace torchext::mt19937 {

namespace {

constexpr std::uint32_t kUpperMask = 0x80000000U;
constexpr std::uint32_t kLowerMask = 0x7fffffffU;

inline std::uint32_t twist(std::uint32_t upper, std::uint32_t lower) {
  const std::uint32_t mixed = (upper & kUpperMask) | (lower & kLowerMask);
  return (mixed >> 1U) ^ ((0U - (lower & 1U)) & kA);
}

// The four steps of tempering. Each is XORed into the number that it is computed from.
constexpr std::uint32_t firstOf(std::uint32_t y) {
  return y >> 11U;
}
constexpr std::uint32_t secondOf(std::uint32_t y) {
  return (y << 7U) & 0x9d2c5680U;
}
constexpr std::uint32_t thirdOf(std::uint32_t y) {
  return (y << 15U) & 0xefc60000U;
}
constexpr std::uint32_t fourthOf(std::uint32_t y) {
  return y >> 18U;
}

// Returns the number from which a step computes `result`. The step shifts bits to one side, so each round recovers more
// of them.
template <typename Step>
std::uint32_t before(Step step, std::uint32_t result) {
  std::uint32_t y = result;
  for (int known_bits = 0; known_bits < 32; known_bits += 7) {
    y = result ^ step(y);
  }
  return y;
}

// The loops are split where a word starts to depend on words of the new block, so that each can be vectorized.
TORCHEXT_SIMD_CLONES
void nextBlocksByLoops(std::uint32_t* state, std::size_t count) {
  std::uint32_t* x = state;
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t j = 0; j < kN - kM; ++j) {
      x[j] = x[j + kM] ^ twist(x[j], x[j + 1]);
    }
    for (std::size_t j = kN - kM; j < kN - 1; ++j) {
      x[j] = x[j + kM - kN] ^ twist(x[j], x[j + 1]);
    }
    x[kN - 1] = x[kM - 1] ^ twist(x[kN - 1], x[0]);
  }
}

}  // namespace

void nextBlocks(std::uint32_t* state, std::size_t count) {
  static const auto kernel = hasAvx512() ? nextBlocksByAvx512 : nextBlocksByLoops;
  kernel(state, count);
}

TORCHEXT_SIMD_CLONES
void temper(const std::uint32_t* words, std::uint32_t* numbers, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t y = words[i];
    y ^= firstOf(y);
    y ^= secondOf(y);
    y ^= thirdOf(y);
    y ^= fourthOf(y);
    numbers[i] = y;
  }
}

std::uint32_t wordOf(std::uint32_t number) {
  const std::uint32_t third = before(fourthOf, number);
  const std::uint32_t second = before(thirdOf, third);
  return before(firstOf, before(secondOf, second));
}

}  // namespace torchext::mt19937

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
