#include "value_shapes.h"

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "../../core/fake/calls/hidden_keys.h"
#include "../../core/fake/storage/fake_factories.h"
#include "../../libraries/support/stack_utils.h"
#include "known_values.h"

namespace torchext {

namespace {

Tensor fakeOf(c10::IntArrayRef sizes, const at::TensorOptions& options) {
  const FakeFactoriesGuard guard;
  return at::empty(sizes, options);
}

// A mask may be broadcast to the tensor that it selects from.
std::optional<Stack> selected(const Tensor& self, const Tensor& mask, const Tensor& value) {
  const auto sizes = at::infer_size(self.sizes(), mask.sizes());
  return Stack{fakeOf({countNonzero(value.expand(sizes))}, self.options())};
}

// The lengths also determine how many sequences each step has.
std::optional<Stack> packed(const Tensor& input, const Tensor& lengths, bool batch_first) {
  Tensor rows;
  Tensor steps;
  {
    const HiddenCalls guard;
    const Tensor like = at::zeros({input.size(0), input.size(1), 1}, at::TensorOptions(c10::kByte));
    std::tie(rows, steps) = at::_pack_padded_sequence(like, lengths, batch_first);
  }
  std::vector<int64_t> sizes = input.sizes().slice(1).vec();
  sizes.front() = rows.size(0);
  const Tensor batch_sizes = fakeOf(steps.sizes(), at::TensorOptions(c10::kLong));
  setValue(batch_sizes, steps, ValueKind::kKnown);
  return Stack{fakeOf(sizes, input.options()), batch_sizes};
}

// (self, weights, minlength). `positions` are the values of `self`. The kernel runs for its errors, on few counts.
std::optional<Stack> counted(const Tensor& positions, const Tensor& weights, int64_t minlength) {
  int64_t needed = 0;
  c10::ScalarType dtype{};
  {
    const HiddenCalls guard;
    const Tensor zeros = at::zeros({}, at::TensorOptions(weights.scalar_type())).expand(weights.sizes());
    dtype = at::bincount(positions.clamp_max(0), zeros, std::min<int64_t>(minlength, 0)).scalar_type();
    needed = positions.numel() == 0 ? 0 : positions.max().item().toLong() + 1;
  }
  return Stack{fakeOf({std::max(needed, minlength)}, weights.options().dtype(dtype))};
}

}  // namespace

std::optional<Stack> resultsBySizes(const OperatorHandle& op, ArrayRef<IValue> arguments, TensorMapper value_of) {
  const std::string& name = op.schema().name();
  const bool is_whole = op.schema().overload_name().empty();
  const bool counts = name == "aten::bincount" && is_whole && arguments[1].isTensor() &&
                      arguments[1].toTensor().device() == arguments[0].toTensor().device();
  const bool selects = name == "aten::masked_select" && is_whole;
  const bool packs = name == "aten::_pack_padded_sequence";
  if (!counts && !selects && !packs) {
    return std::nullopt;
  }
  const Tensor& read = arguments[counts ? 0 : 1].toTensor();
  TORCH_CHECK(!packs || read.is_cpu(), "'lengths' argument should be a 1D CPU int64 tensor, but got ", read.dim(), "D ",
              read.device(), " ", read.scalar_type(), " tensor");  // the values are on the CPU
  const Tensor value = isSmall(read) ? value_of(read) : Tensor{};
  if (!value.defined()) {
    return std::nullopt;
  }
  if (counts) {
    return counted(value, arguments[1].toTensor(), arguments[2].toInt());
  }
  const Tensor& self = arguments.front().toTensor();
  return selects ? selected(self, read, value) : packed(self, value, arguments[2].toBool());
}

}  // namespace torchext
