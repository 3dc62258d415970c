#pragma once

#include <cstdint>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/Device.h>
#include <torchext/macros.h>

namespace torchext {

// The random generators of fake CUDA devices have the state of real ones (a seed and an offset). They draw nothing, but
// move as real ones do: NOTE [How far CUDA generators move].

// Returns a new generator of `device`.
at::Generator newFakeCudaGenerator(c10::DeviceIndex device);

// Returns the generator of `device` that is drawn from by default.
TORCHEXT_API const at::Generator& defaultFakeCudaGenerator(c10::DeviceIndex device);

// How far a call would move the generator of a fake CUDA device. To be found before the call, which replaces its
// arguments, and taken when it has succeeded.
class FakeCudaDraws {
 public:
  // Nothing is moved by operators that draw from no such generator on this thread, or for which no rule is known.
  FakeCudaDraws(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

  void take();

 private:
  at::Generator generator_;
  std::uint64_t offset_ = 0;
};

}  // namespace torchext
