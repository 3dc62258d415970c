#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/MT19937RNGEngine.h>

namespace torchext {

// Draws random numbers from an engine, many at once. Leaves the engine in the state after as many calls of
// `at::mt19937::operator()`.
class Twister {
 public:
  // Returns true if PyTorch can leave the engine in its state: after a seed, or after draws. A state that was assembled
  // by hand may differ.
  static bool understands(const at::mt19937_data_pod& engine);

  // `understands(engine)` must hold. The engine must outlive this object.
  explicit Twister(at::mt19937_data_pod& engine) : engine_{engine} {}

  void take(std::uint32_t* numbers, std::int64_t count);

 private:
  at::mt19937_data_pod& engine_;
};

// Returns true if the states of the engines are equal in all bytes.
bool areSame(const at::mt19937_data_pod& a, const at::mt19937_data_pod& b);

}  // namespace torchext
