#include "kernel_identity.h"

#include <cstring>
#include <memory>

#include <ATen/core/op_registration/op_registration.h>

namespace torchext {

using c10::KernelFunction;

// KernelFunction's comparison compares only its function pointers, which all kernels written in Python share. Its first
// words are the pointer to its functor, which it owns, and three function pointers.
KernelIdentity identityOf(const KernelFunction& kernel) {
  KernelIdentity identity{};
  static_assert(sizeof(kernel) >= sizeof(identity));
  std::memcpy(identity.data(), static_cast<const void*>(&kernel), sizeof(identity));
  return identity;
}

namespace {

// Like a kernel written in Python: a function and an object.
struct Functor final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/) {}
};

KernelFunction makeKernel() {
  return KernelFunction::makeFromBoxedFunctor(std::make_unique<Functor>());
}

}  // namespace

bool testKernelIdentity(bool is_broken) {
  const KernelFunction kernel = makeKernel();
  const KernelFunction& other = is_broken ? kernel : makeKernel();
  const KernelFunction copy = kernel;  // NOLINT(performance-unnecessary-copy-initialization): the copy is tested
  return identityOf(copy) == identityOf(kernel) && identityOf(other) != identityOf(kernel);
}

}  // namespace torchext
