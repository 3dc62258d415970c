#include "follow_values.h"

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/_pack_padded_sequence.h>
#include <ATen/ops/bincount.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torchext/fake_tensor.h>

#include "../../core/fake/calls/op_traits.h"
#include "../../core/fake/calls/recording.h"
#include "../../core/fake/meta/device_rules.h"
#include "../../core/fake/storage/fake_keys.h"
#include "../../core/hooks/hooks.h"
#include "../../libraries/support/stack_utils.h"
#include "assumed_values.h"
#include "known_values.h"

namespace torchext {

namespace {

bool isMaskDtype(c10::ScalarType dtype) {
  return dtype == c10::kBool || dtype == c10::kByte;
}

// Returns how many elements `mask` selects, or nothing if this is neither known nor assumed.
std::optional<int64_t> countSelected(const OperatorHandle& op, const Tensor& mask, Noting noting) {
  if (const Tensor value = valueOf(mask); value.defined()) {
    return countNonzero(value);
  }
  return isFake(mask) ? assumedCount(op, mask, noting) : std::nullopt;
}

// Gives overwritten tensors bytes before a call, so that their new values are recorded. The destructor removes these
// bytes again unless `keep()` was called.
class Overwrites {
 public:
  Overwrites(const OperatorHandle& op, ArrayRef<IValue> arguments) {
    forEachWritten(op.schema(), arguments, [&](const Tensor& tensor, std::size_t position) {
      if (isFake(tensor) && !valueOf(tensor).defined() && overwritesUnknown(op, position, tensor)) {
        has_room_ = makePart(tensor, ValueKind::kKnown) && has_room_;  // keeps what other arguments show of it
        tensors_.push_back(tensor);
      }
    });
  }
  C10_DISABLE_COPY_AND_ASSIGN(Overwrites);
  ~Overwrites() {
    for (const Tensor& tensor : tensors_) {
      forgetElements(tensor);
    }
  }

  bool haveRoom() const noexcept {
    return has_room_;
  }

  void keep() noexcept {
    tensors_.clear();
  }

 private:
  std::vector<Tensor> tensors_;
  bool has_room_ = true;
};

bool isAllOnCpu(ArrayRef<IValue> values) {
  return !hasTensor(values, [](const Tensor& value) { return !value.is_cpu(); });
}

// Runs `op` on the known values. Returns nothing if the CPU kernel raises but the fakes are on another device, whose
// kernel might not raise.
std::optional<Stack> tryRunOnKnown(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  try {
    return runOn(op, arguments, [](const Tensor& tensor) { return valueOf(tensor); });
  } catch (const c10::Error&) {
    if (isAllOnCpu(arguments) && isAllOnCpu(results)) {
      throw;
    }
    return std::nullopt;
  }
}

// Stores zeros and ones as fills, or as a repeated element in a large mask or tensor of integers. Returns false for a
// call that makes or writes other values.
bool followFill(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  const auto fill = results.size() == 1 && results.front().isTensor() ? fillOf(op, arguments) : std::nullopt;
  if (!fill) {
    return false;
  }
  const Tensor& filled = results.front().toTensor();
  // A fill of a tensor with a negative bit leaves -0.0 in memory. Existing bytes may be shared with an array.
  const bool is_new = isMadeByCall(filled, arguments) || (overwritesStorage(op, 0, filled) && !hasValue(filled));
  if (filled.is_neg() || !is_new) {
    return false;
  }
  if (!isSmall(filled)) {
    const HiddenCalls guard;
    setElements(filled, at::full({1}, *fill ? 1 : 0, at::TensorOptions(filled.scalar_type())), ValueKind::kKnown);
    return true;
  }
  setFill(filled, *fill);
  return true;
}

// Returns false if the values of the results and of the written arguments are unknown.
bool followKnown(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  const bool are_small = areSmall(results);
  if (!canRunOnValues(op) || (!are_small && !mayBeAssumed(results))) {
    return false;
  }
  if (followFill(op, arguments, results)) {
    return true;
  }
  if (!are_small || !areValuesKnown(op, arguments)) {
    return false;
  }
  if (const auto range = rangeOf(op, arguments)) {
    const auto& [start, end, step] = *range;
    setRange(results.front().toTensor(), start, end, step);
    return true;
  }
  Overwrites overwrites{op, arguments};
  const std::optional<Stack> values = overwrites.haveRoom() ? tryRunOnKnown(op, arguments, results) : std::nullopt;
  if (!values) {
    return false;
  }
  overwrites.keep();
  giveValues(results, *values, arguments, ValueKind::kKnown);
  return true;
}

}  // namespace

void expandMasks(const OperatorHandle& op, Stack& arguments, Noting noting) {
  const std::size_t count = op.schema().arguments().size();
  const bool has_fake = hasTensor(topOf(arguments, count), [](const Tensor& tensor) { return isFake(tensor); });
  if (!has_fake || isRecording() || areValuesKnown(op, topOf(arguments, count))) {
    return;  // it is run for real, or the values of the result become known
  }
  IValue& indices = torch::jit::peek(arguments, 1, count);
  const Tensor self = torch::jit::peek(arguments, 0, count).toTensor();
  c10::List<std::optional<Tensor>> expanded;
  int64_t dim = 0;
  for (const IValue& element : indices.toListRef()) {
    const Tensor index = element.isNone() ? Tensor{} : element.toTensor();
    if (!index.defined() || !isMaskDtype(index.scalar_type())) {
      expanded.push_back(index.defined() ? std::optional{index} : std::nullopt);
      ++dim;
      continue;
    }
    if (dim + index.dim() > self.dim() || !index.sizes().equals(self.sizes().slice(toSize(dim), toSize(index.dim())))) {
      return;  // does not fit
    }
    const auto selected = countSelected(op, index, noting);
    if (!selected) {
      return;
    }
    const FakeFactoriesGuard guard;
    for (int64_t i = 0; i < index.dim(); ++i, ++dim) {
      expanded.push_back(at::empty({*selected}, at::TensorOptions(c10::kLong).device(index.device())));
    }
  }
  indices = std::move(expanded);
}

bool answerForValues(const OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  if (isRecording()) {
    return false;
  }
  if (hooks().kernels.compareDevices(op)) {
    outputDevice(op, stack);  // raises for arguments on different devices
  }
  const auto arguments = topOf(stack, count);
  auto results = resultsBySizes(op, arguments, [](const Tensor& tensor) { return valueOf(tensor); });
  if (!results) {
    results = assumeValues(op, arguments);
  }
  if (!results) {
    return false;
  }
  replaceTop(stack, count, *std::move(results));
  return true;
}

void followValues(const OperatorHandle& op, ArrayRef<IValue> arguments, ArrayRef<IValue> results) {
  if (op.hasTag(at::Tag::inplace_view)) {
    return;  // metadata only
  }
  const Stack written = writtenBy(op, arguments);
  const bool makes = hasTensor(results, [&](const Tensor& result) { return isMadeByCall(result, arguments); });
  const bool checks = results.empty();  // `_linalg_check_errors` raises an error or does nothing
  if ((makes || checks || !written.empty()) && !followKnown(op, arguments, results) &&
      !assumeResults(op, arguments, results, written)) {
    forgetAll(written);
  }
}

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
