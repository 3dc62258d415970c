#pragma once

#include <cstdint>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

// The random generators of fake CUDA devices have the state of real ones (a seed and an offset). They draw nothing, but
// advance as real ones do: NOTE [Moves of CUDA generators].

// Returns a new generator of `device`.
at::Generator newFakeCudaGenerator(c10::DeviceIndex device);

// Returns the default generator of `device`.
TORCHEXT_API const at::Generator& defaultFakeCudaGenerator(c10::DeviceIndex device);

// The offset by which a call advances the generator of a fake CUDA device. Construct before the call, which replaces
// its arguments, and call `take()` when it has succeeded.
class FakeCudaDraws {
 public:
  // The offset is 0 for operators that draw from no such generator on this thread, or that have no rule.
  FakeCudaDraws(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  void take();

 private:
  at::Generator generator_;
  std::uint64_t offset_ = 0;
};

}  // namespace torchext
