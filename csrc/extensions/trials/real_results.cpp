// NOTE [Correcting Meta kernels]
//
// The dtypes, shapes and strides of Meta kernels sometimes differ from those of the real kernels: many are separate
// Python functions. A trial of a call (NOTE [Errors of real tensors]) provides real results, which take
// precedence:
//
//   * dtypes always: for example, those of an empty convolution are promoted;
//   * shapes and strides if the trial had the sizes of the call: `pixel_unshuffle()` returns an empty tensor unchanged,
//     `zeros_like()` keeps the strides of dimensions of length 1;
//   * the order of strides if the trial was smaller: `floor_divide()` keeps that of its argument.
//
// Trials run on the CPU. For calls on CUDA they correct only strides, and the rules for elementwise CUDA kernels and
// convolutions are applied last (device_kernels.cpp).

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/DimVector.h>
#include <c10/util/irange.h>

#include "../../libraries/support/stack_utils.h"
#include "trial_hooks.h"

namespace torchext {

namespace {

using Order = c10::SmallVector<std::size_t, c10::kDimVectorStaticSize>;

// Returns the dimensions longer than 1, from the innermost to the outermost.
Order orderOfStrides(const Tensor& tensor) {
  Order order;
  for (const auto dim : c10::irange(toSize(tensor.dim()))) {
    if (tensor.sizes()[dim] > 1) {
      order.push_back(dim);
    }
  }
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return tensor.strides()[a] < tensor.strides()[b]; });
  return order;
}

Tensor corrected(const Tensor& meta, const Tensor& real, bool has_sizes) {
  const c10::IntArrayRef sizes = has_sizes ? real.sizes() : meta.sizes();
  const c10::DimVector strides = has_sizes ? c10::DimVector(real.strides()) : stridesLike(real, meta);
  const bool is_right =
      meta.scalar_type() == real.scalar_type() && meta.sizes() == sizes && meta.strides() == c10::IntArrayRef(strides);
  return is_right ? meta : at::empty_strided(sizes, strides, meta.options().dtype(real.scalar_type()));
}

std::vector<Tensor> tensorsIn(const IValue& value) {
  std::vector<Tensor> tensors;
  forEachTensor(value, [&tensors](const Tensor& tensor) { tensors.push_back(tensor); });
  return tensors;
}

IValue corrected(const IValue& meta, const IValue& real, bool has_sizes) {
  if (meta.isTensor() && real.isTensor() && !real.toTensor().defined()) {
    return real;
  }
  const std::vector<Tensor> real_tensors = tensorsIn(real);
  if (real_tensors.size() != tensorsIn(meta).size()) {
    return meta;
  }
  auto next = real_tensors.begin();
  return mapTensors(meta, [&](const Tensor& tensor) { return corrected(tensor, *next++, has_sizes); });
}

bool isSame(const IValue& a, const IValue& b) {
  const std::vector<Tensor> tensors = tensorsIn(a);
  const std::vector<Tensor> others = tensorsIn(b);
  return std::equal(tensors.begin(), tensors.end(), others.begin(), others.end(),
                    [](const Tensor& tensor, const Tensor& other) { return tensor.is_same(other); });
}

// Returns true if a written tensor has changed in the same way as its stand-in.
bool hasChangedAlike(const IValue& meta, const IValue& real) {
  return meta.isTensor() == real.isTensor() &&
         (!meta.isTensor() ||
          meta.toTensor().strides() == c10::IntArrayRef(stridesLike(real.toTensor(), meta.toTensor())));
}

template <typename Condition>
void correctIf(const Condition& condition, const RealResults& real, const OperatorHandle& op, Stack& stack) {
  const auto& returns = op.schema().returns();
  if (real.values.size() < returns.size()) {
    return;
  }
  for (const auto i : c10::irange(returns.size())) {
    IValue& meta = torch::jit::peek(stack, i, returns.size());
    if (returns[i].alias_info() == nullptr && condition(meta, real.values[i])) {
      meta = corrected(meta, real.values[i], real.has_sizes);
    }
  }
}

}  // namespace

c10::DimVector stridesLike(const Tensor& real, const Tensor& meta) {
  c10::DimVector strides(meta.strides());
  if (real.dim() != meta.dim() || meta.numel() == 0 || !real.is_non_overlapping_and_dense() ||
      !meta.is_non_overlapping_and_dense()) {
    return strides;
  }
  const Order order = orderOfStrides(real);
  const Order of_meta = orderOfStrides(meta);
  if (std::is_permutation(order.begin(), order.end(), of_meta.begin(), of_meta.end())) {
    std::int64_t stride = 1;
    for (const std::size_t dim : order) {
      strides[dim] = stride;
      stride *= meta.sizes()[dim];
    }
  }
  return strides;
}

bool agrees(const RealResults& real, const OperatorHandle& op, Arguments results) {
  const std::size_t num_returns = op.schema().returns().size();
  if (real.values.size() != results.size()) {
    return true;  // the trial has no results
  }
  const auto returned = results.slice(0, num_returns);
  const auto written = results.slice(num_returns);
  Stack stack = returned.vec();
  correctByReal(real, op, stack);
  return std::equal(stack.begin(), stack.end(), returned.begin(), isSame) &&
         std::equal(written.begin(), written.end(), real.values.begin() + static_cast<std::ptrdiff_t>(num_returns),
                    hasChangedAlike);
}

// Skips results that are arguments or views.
void correctByReal(const RealResults& real, const OperatorHandle& op, Stack& stack) {
  correctIf([](const IValue& /*meta*/, const IValue& /*real*/) { return true; }, real, op, stack);
}

// Only for results that otherwise agree with the Meta kernel's.
void correctStridesByReal(const RealResults& real, const OperatorHandle& op, Stack& stack) {
  const auto differs_in_strides_only = [&real](const IValue& meta, const IValue& found) {
    if (!meta.isTensor() || !found.isTensor() || !meta.toTensor().defined() || !found.toTensor().defined()) {
      return false;
    }
    const Tensor& a = meta.toTensor();
    const Tensor& b = found.toTensor();
    return a.scalar_type() == b.scalar_type() && (real.has_sizes ? a.sizes() == b.sizes() : a.dim() == b.dim());
  };
  correctIf(differs_in_strides_only, real, op, stack);
}

}  // namespace torchext
