#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext {

// The random numbers of an engine, many at once. What it leaves in the engine is what as many calls of
// `at::mt19937::operator()` would have left there.
class Twister {
 public:
  // Returns true if the engine is in a state that PyTorch leaves it in: after a seed, or after draws. A state that was
  // put together by hand may be another.
  static bool understands(const at::mt19937_data_pod& engine);

  // The engine must outlive this, and be understood.
  explicit Twister(at::mt19937_data_pod& engine) : engine_{engine} {}

  void take(std::uint32_t* numbers, std::int64_t count);

 private:
  at::mt19937_data_pod& engine_;
};

// Returns true if the engines are in the same state to the last byte.
bool areSame(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b);

}  // namespace torchext
