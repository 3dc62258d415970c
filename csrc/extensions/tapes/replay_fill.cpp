#include "replay_fill.h"

#include <cstddef>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "draws.h"
#include "truncated_normals.h"
#include "twister_tape.h"

namespace torchext {

using at::Tensor;
using torch::jit::Stack;

std::optional<Distribution> distributionOf(const c10::OperatorHandle& op) {
  if (op.schema().name() == "aten::uniform_") {
    return Distribution::Uniform;
  }
  if (op.schema().name() == "aten::normal_") {
    return Distribution::Normal;
  }
  return std::nullopt;
}

bool replayFill(const c10::OperatorHandle& op, Stack& stack, const at::Generator& generator, AfterStretch after) {
  const auto truncated = TruncatedNormals::of(op, stack);
  const auto distribution = distributionOf(op);
  if (!truncated && !distribution) {
    return false;
  }
  const std::size_t count = op.schema().arguments().size();
  const Tensor self = torch::jit::peek(stack, 0, count).toTensor();
  if (!self.is_cpu() || !isPlainlyContiguous(self)) {
    return false;
  }
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  at::mt19937_data_pod engine = impl.engine().data();
  const auto number = [&](std::size_t index) { return torch::jit::peek(stack, index, count).toDouble(); };
  const bool is_filled = truncated ? truncated->fill(self.mutable_data_ptr(), self.numel(), engine)
                                   : fillRandomly({*distribution, self.scalar_type(), number(1), number(2)},
                                                  self.mutable_data_ptr(), self.numel(), engine, after);
  if (!is_filled) {
    return false;
  }
  setEngine(impl, engine);
  stack = {self};
  return true;
}

}  // namespace torchext
