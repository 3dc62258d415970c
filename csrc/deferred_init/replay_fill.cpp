#include "replay_fill.h"

#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include "../fills/fill.h"

namespace torchext {

using at::Tensor;
using torch::jit::Stack;

namespace {

std::optional<Distribution> distributionOf(const c10::OperatorHandle& op) {
  if (op.schema().name() == "aten::uniform_") {
    return Distribution::Uniform;
  }
  if (op.schema().name() == "aten::normal_") {
    return Distribution::Normal;
  }
  return std::nullopt;
}

}  // namespace

bool replayFill(const c10::OperatorHandle& op, Stack& stack, const at::Generator& generator) {
  const auto distribution = distributionOf(op);
  if (!distribution) {
    return false;
  }
  const Tensor self = torch::jit::peek(stack, 0, 4).toTensor();
  // `is_contiguous()` of `normal_` (DistributionTemplates.h). What `uniform_` writes to other tensors is in the order
  // of their strides.
  if (!self.is_cpu() || !self.is_contiguous()) {
    return false;
  }
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937_data_pod engine = impl.engine().data();
  const RandomFill fill{*distribution, self.scalar_type(), torch::jit::peek(stack, 1, 4).toDouble(),
                        torch::jit::peek(stack, 2, 4).toDouble()};
  if (!fillRandomly(fill, self.mutable_data_ptr(), self.numel(), engine)) {
    return false;
  }
  at::mt19937 moved;
  moved.set_data(engine);
  impl.set_engine(moved);
  stack = {self};
  return true;
}

}  // namespace torchext
