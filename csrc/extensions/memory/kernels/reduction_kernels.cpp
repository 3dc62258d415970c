// Reductions: the Reduce*Kernel.cu in ATen/native/cuda, and ReduceOps.cpp, which calls them.

#include <cmath>
#include <optional>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>

#include "../../../core/support/sizes.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

// The indices of the arguments of an operator, or -1.
struct ReductionArguments {
  int dims = -1;
  int keepdim = -1;
};

std::optional<std::vector<std::int64_t>> dimsOf(const KernelCall& call, ReductionArguments where) {
  if (where.dims < 0) {
    return std::nullopt;
  }
  const c10::IValue& dims = call.argument(toSize(where.dims));
  if (dims.isNone()) {
    return std::nullopt;
  }
  return dims.isInt() ? std::vector<std::int64_t>{dims.toInt()} : dims.toIntVector();
}

bool keepsDims(const KernelCall& call, ReductionArguments where) {
  return where.keepdim >= 0 && call.argument(toSize(where.keepdim)).toBool();
}

struct Accumulator {
  std::int64_t bytes;
  int vector_size = 4;
};

// Reduces `input` to all results of the call.
void reduce(KernelCall& call, const Tensor& input, ReductionArguments where, Accumulator accumulator) {
  const auto dims = dimsOf(call, where);
  std::vector<Tensor> results;
  for (const c10::IValue& result : call.results) {
    results.push_back(result.toTensor());
  }
  reduceOnGpu(call, {input, results, dims ? c10::OptionalIntArrayRef{*dims} : c10::OptionalIntArrayRef{},
                     keepsDims(call, where), accumulator.bytes, accumulator.vector_size});
}

// A reduction in the dtype of the result copies an input of another dtype, except from half precision to float.
void reduceInDtypeOfResult(KernelCall& call, ReductionArguments where) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  const c10::ScalarType dtype = call.result().scalar_type();
  const bool is_cast_by_kernel = c10::isReducedFloatingType(self.scalar_type()) && dtype == at::kFloat;
  if (self.scalar_type() == dtype || is_cast_by_kernel) {
    reduce(call, self, where, {accumulatorBytes(dtype)});
    return;
  }
  const auto strides = self.is_non_overlapping_and_dense()
                           ? self.strides().vec()
                           : at::infer_dense_strides(self.sizes(), self.strides());  // as `to()` makes them
  const Tensor cast = at::detail::empty_strided_meta(self.sizes(), strides, dtype);
  const BlockNumber copy = call.allocate(self.numel() * static_cast<std::int64_t>(c10::elementSize(dtype)));
  reduce(call, cast, where, {accumulatorBytes(dtype)});
  call.free(copy);
}

void reduceAll(KernelCall& call) {
  reduceInDtypeOfResult(call, {});
}

void reduceDims(KernelCall& call) {
  reduceInDtypeOfResult(call, {1, 2});
}

void vectorNorm(KernelCall& call) {
  reduceInDtypeOfResult(call, {2, 3});
}

// For extrema, threads keep one value in the dtype of the input.
void extremum(KernelCall& call, ReductionArguments where) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  reduce(call, self, where, {toSigned(self.element_size())});
}

void extremumOfAll(KernelCall& call) {
  extremum(call, {});
}

void extremumOfDims(KernelCall& call) {
  extremum(call, {1, 2});
}

// A value and its index.
constexpr std::int64_t kPair = 16;

void extremumWithIndex(KernelCall& call) {
  call.allocateResults();
  reduce(call, call.tensor(0), {1, 2}, {kPair});
}

// Without a dimension, the tensor is reduced as a vector.
void indexOfExtremum(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  const BlockNumber copy = call.argument(1).isNone() && !self.is_contiguous() ? call.copy(self) : -1;
  const Tensor contiguous =
      copy < 0 ? self : Tensor{at::detail::empty_strided_meta({self.numel()}, {1}, self.scalar_type())};
  reduce(call, contiguous, copy < 0 ? ReductionArguments{1, 2} : ReductionArguments{}, {kPair});
  call.free(copy);
}

void isAnyOfAll(KernelCall& call) {
  call.allocateResults();
  reduce(call, call.tensor(0), {}, {1});
}

void isAnyOfDims(KernelCall& call) {
  call.allocateResults();
  reduce(call, call.tensor(0), {1, 2}, {1});
}

// Mean, sum of squares, and two counts, by Welford's algorithm.
void variance(KernelCall& call) {
  call.allocateResults();
  const std::int64_t number = accumulatorBytes(call.tensor(0).scalar_type());
  reduce(call, call.tensor(0), {1, 3}, {4 * number, 2});
}

// Both extrema together: `aminmax_allreduce_kernel()`, which copies tensors that are not contiguous.
void reduceToExtrema(KernelCall& call, const Tensor& self, const c10::OptionalIntArrayRef& dims, bool keepdim) {
  std::vector<Tensor> results;
  const Tensor one = at::detail::empty_meta({}, self.scalar_type());
  for (const c10::IValue& result : call.results) {
    results.push_back(dims.has_value() ? result.toTensor() : one);
  }
  const auto element = toSigned(self.element_size());
  reduceOnGpu(call, {self, results, dims, keepdim, 2 * element});
}

void extremaTogether(KernelCall& call) {
  call.allocateResults();
  const auto dims = dimsOf(call, {1, 2});
  reduceToExtrema(call, call.tensor(0), dims ? c10::OptionalIntArrayRef{*dims} : c10::OptionalIntArrayRef{},
                  keepsDims(call, {1, 2}));
}

// `count_nonzero_cuda()`: a mask of nonzero elements, and their number.
void countNonzero(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  const BlockNumber are_nonzero = self.scalar_type() == at::kBool ? -1 : call.allocate(self.numel());
  call.allocateResult(0);
  const BlockNumber as_numbers = call.allocate(self.numel() * toSigned(sizeof(std::int64_t)));
  const Tensor numbers = at::detail::empty_meta(self.sizes(), at::kLong);
  reduce(call, numbers, {1}, {accumulatorBytes(at::kLong)});
  call.free({as_numbers, are_nonzero});
}

// `renorm_out()` in Normalization.cpp: the norms, in float, and the factors computed from them.
void renorm(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  if (self.numel() == 0) {
    return;
  }
  const std::int64_t kept =
      call.argument(2).toInt() < 0 ? call.argument(2).toInt() + self.dim() : call.argument(2).toInt();
  const std::vector<std::int64_t> dims = dimsBut(self, kept);
  const std::int64_t number = accumulatorBytes(self.scalar_type());
  const BlockNumber norms = call.allocate(self.size(kept) * number);
  const Tensor result = at::detail::empty_meta({self.size(kept)}, self.scalar_type());
  reduceOnGpu(call, {self, result, c10::OptionalIntArrayRef{dims}, /*keepdim=*/false, number});
  const auto element = toSigned(self.element_size());
  const BlockNumber factors = number == element ? -1 : call.allocate(self.size(kept) * element);
  call.free({factors, norms});
}

// `_histc_cuda_template()` computes the bounds if they are not given.
void histogram(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  if (self.numel() == 0 || !call.argument(2).toScalar().equal(0) || !call.argument(3).toScalar().equal(0)) {
    return;
  }
  const auto element = toSigned(self.element_size());
  const BlockNumber smallest = call.allocate(element);
  const BlockNumber largest = call.allocate(element);
  reduceToExtrema(call, self, std::nullopt, /*keepdim=*/false);
  call.free({smallest, largest});
}

// `isin_default_kernel_gpu()`, for few test elements. More are sorted, and the memory depends on their values.
void isIn(KernelCall& call) {
  call.allocateResults();
  const Tensor& elements = call.tensor(0);
  const Tensor& wanted = call.tensor(1);
  if (static_cast<double>(wanted.numel()) < 10.0 * std::pow(static_cast<double>(elements.numel()), 0.145)) {
    const BlockNumber are_equal = call.allocate(elements.numel() * wanted.numel());
    const BlockNumber are_in = call.allocate(elements.numel());
    call.free({are_in, are_equal});
  }
}

const KernelRules kReductionRules{
    {reduceAll, {"aten::sum", "aten::mean"}},
    {reduceDims, {"aten::sum.dim_IntList", "aten::mean.dim", "aten::nansum"}},
    {vectorNorm, {"aten::linalg_vector_norm", "aten::norm.ScalarOpt_dim", "aten::norm.ScalarOpt_dim_dtype"}},
    {extremumOfAll, {"aten::max", "aten::min"}},
    {extremumOfDims, {"aten::amax", "aten::amin"}},
    {extremumWithIndex, {"aten::max.dim", "aten::min.dim"}},
    {indexOfExtremum, {"aten::argmax", "aten::argmin"}},
    {isAnyOfAll, {"aten::any", "aten::all"}},
    {isAnyOfDims, {"aten::any.dim", "aten::all.dim", "aten::any.dims", "aten::all.dims"}},
    {extremaTogether, {"aten::aminmax"}},
    {countNonzero, {"aten::count_nonzero.dim_IntList"}},
    {renorm, {"aten::renorm"}},
    {histogram, {"aten::histc"}},
    {isIn, {"aten::isin.Tensor_Tensor"}},
    {variance,
     {"aten::var.correction", "aten::std.correction", "aten::var_mean.correction", "aten::std_mean.correction"}},
};

}  // namespace

}  // namespace torchext
