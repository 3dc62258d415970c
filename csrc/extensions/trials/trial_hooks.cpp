#include "trial_hooks.h"

#include "../../core/hooks/hooks.h"
#include "memory_overlap.h"
#include "real_results.h"
#include "refusals.h"
#include "zeros_call.h"

namespace torchext {

namespace {

class Trials final : public KernelTrials {
 public:
  constexpr Trials() = default;

  RealResults refuse(const OperatorHandle& op, Arguments arguments, Arguments meta_results) const override {
    return refuseAsReal(op, arguments, meta_results);
  }

  RealResults refuse(const OperatorHandle& op, Arguments arguments) const override {
    return refuseAsReal(op, arguments);
  }

  RealResults refuseIfSmall(const OperatorHandle& op, Arguments arguments) const override {
    return refuseAsRealIfSmall(op, arguments);
  }

  void refuseIfCheap(const OperatorHandle& op, Arguments arguments) const override {
    refuseAsRealIfCheap(op, arguments);
  }

  void refuseOverlap(const OperatorHandle& op, const Stack& stack) const override {
    checkMemoryOverlap(op, stack);
  }

  void correct(const RealResults& real, const OperatorHandle& op, Stack& stack) const override {
    correctByReal(real, op, stack);
  }

  void correctStrides(const RealResults& real, const OperatorHandle& op, Stack& stack) const override {
    correctStridesByReal(real, op, stack);
  }

  c10::DimVector stridesLike(const Tensor& real, const Tensor& meta) const override {
    return torchext::stridesLike(real, meta);
  }

  bool mayRunOnZeros(const OperatorHandle& op, const Stack& stack) const override {
    return torchext::mayRunOnZeros(op, stack);
  }

  std::optional<Stack> runOnZeros(const OperatorHandle& op, const Stack& stack, c10::Device device) const override {
    return tryRunOnZeros(op, stack, device);
  }
};

}  // namespace

void registerKernelTrials() {
  static constexpr Trials trials;
  hooks().trials = &trials;
}

}  // namespace torchext
