// Writes and additions by index: Indexing.cu, TensorAdvancedIndexing.cpp, TensorTransformations.cu.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>

#include "../../../core/support/sizes.h"
#include "arithmetic.h"
#include "cub_buffers.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

constexpr std::int64_t kIndex = 8;  // bytes

bool isMask(const Tensor& index) {
  return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
}

// The indices of a call, at most one per dimension, expanded to the same sizes.
class Indices {
 public:
  explicit Indices(const c10::IValue& list) {
    for (const c10::IValue& item : list.toListRef()) {
      tensors_.push_back(item.isTensor() ? item.toTensor() : Tensor{});
      has_mask_ = has_mask_ || (tensors_.back().defined() && isMask(tensors_.back()));
    }
    if (has_mask_) {  // stands for one index per dimension of the mask, of unknown sizes
      return;
    }
    for (const Tensor& index : tensors_) {
      if (index.defined()) {
        sizes_ = at::infer_size_dimvector(sizes_, index.sizes());
      }
    }
    for (Tensor& index : tensors_) {
      if (index.defined()) {
        const auto expanded = at::inferExpandGeometry_dimvector(index.sizes(), index.strides(), sizes_);
        index = at::detail::empty_strided_meta(expanded.sizes, expanded.strides, at::kLong);
      }
    }
  }

  const std::vector<Tensor>& tensors() const {
    return tensors_;
  }
  bool hasMask() const {  // the number of indices depends on its values
    return has_mask_;
  }
  std::int64_t count() const {
    return c10::multiply_integers(sizes_);
  }
  bool isGiven(std::int64_t dim) const {
    return dim < toSigned(tensors_.size()) && tensors_[toSize(dim)].defined();
  }
  // `hasContiguousSubspace()`: the indexed dimensions are adjacent.
  bool areAdjacent(std::int64_t num_dims) const {
    int changes = 0;
    for (std::int64_t dim = 1; dim < num_dims; ++dim) {
      changes += isGiven(dim) != isGiven(dim - 1) ? 1 : 0;
    }
    return changes < 2 || (changes == 2 && !isGiven(0));
  }

 private:
  std::vector<Tensor> tensors_;
  c10::DimVector sizes_;
  bool has_mask_ = false;
};

// `wrapIndexOnce()`: checks that all indices are in bounds, unless that is known.
void checkBounds(KernelCall& call, const Tensor& index) {
  const BlockNumber smallest = call.allocate(kIndex);
  const BlockNumber largest = call.allocate(kIndex);
  if (!index.is_contiguous()) {
    call.allocateAndFree(index.numel() * kIndex);
  }
  const Tensor contiguous = at::detail::empty_meta({index.numel()}, at::kLong);
  const Tensor result = at::detail::empty_meta({}, at::kLong);
  reduceOnGpu(call, {contiguous, {result, result}, std::nullopt, /*keepdim=*/false, 2 * kIndex});
  call.allocateAndFree(1);
  call.allocateAndFree(1);
  call.free({smallest, largest});
}

// `computeLinearIndex()`: the positions in the tensor, as if it had one dimension.
BlockNumber linearIndex(KernelCall& call, const Indices& indices, bool is_checked) {
  BlockNumber linear = -1;
  for (const Tensor& index : indices.tensors()) {
    if (!index.defined()) {
      continue;
    }
    if (is_checked) {
      checkBounds(call, index);
    }
    const BlockNumber wrapped = call.allocate(index.numel() * kIndex);
    const BlockNumber scaled = call.allocate(index.numel() * kIndex);
    call.free(wrapped);
    if (linear < 0) {
      linear = scaled;
    } else {
      call.free(scaled);
    }
  }
  return linear;
}

// `index_put_with_sort_kernel()`.
void addBySortedIndex(KernelCall& call, const Indices& indices, const Tensor& values, bool is_checked) {
  const Tensor& self = call.tensor(0);
  const BlockNumber self_copy = self.is_contiguous() ? -1 : call.copy(self);
  std::int64_t elements = 1;  // per index
  std::int64_t slice = 1;     // those of them that are contiguous, after the indices
  const bool are_adjacent = indices.areAdjacent(self.dim());
  bool is_behind = !are_adjacent;  // other dimensions are moved to the end
  for (std::int64_t dim = 0; dim < self.dim(); ++dim) {
    is_behind = is_behind || indices.isGiven(dim);
    const std::int64_t size = indices.isGiven(dim) ? 1 : self.size(dim);
    elements *= size;
    slice *= is_behind ? size : 1;
  }
  const BlockNumber linear = linearIndex(call, indices, is_checked);
  const std::int64_t count = indices.count();
  const auto element = toSigned(self.element_size());
  const bool is_ready = values.numel() == count * elements && values.is_contiguous();
  const BlockNumber values_copy = is_ready ? -1 : call.allocate(count * elements * element);
  const BlockNumber permuted = are_adjacent ? -1 : call.copy(self);
  const BlockNumber sorted = call.allocate(count * kIndex);
  const BlockNumber original = call.allocate(count * kIndex);
  const BlockNumber range = call.allocate(count * kIndex);
  call.allocateAndFree(cubRadixSortBytes({count, kIndex, kIndex, countBits((self.numel() - 1) / slice)}));
  call.free({range, original, sorted, permuted, values_copy, linear, self_copy});
}

// `AdvancedIndex`: the kernel requires all indices to have the same strides.
std::vector<BlockNumber> copyIndices(KernelCall& call, const Indices& indices) {
  std::vector<Tensor> given;
  for (const Tensor& index : indices.tensors()) {
    if (index.defined()) {
      given.push_back(index);
    }
  }
  const bool are_same = std::all_of(
      given.begin(), given.end(), [&given](const Tensor& index) { return index.strides() == given.front().strides(); });
  std::vector<BlockNumber> copies;
  for (const Tensor& index : given) {
    copies.push_back(are_same || index.is_contiguous() ? -1 : call.copy(index));
  }
  return copies;
}

void freeIndices(KernelCall& call, const std::vector<BlockNumber>& copies) {
  for (const BlockNumber copy : copies) {
    call.free(copy);
  }
}

void index(KernelCall& call) {
  const Indices indices{call.argument(1)};
  if (indices.hasMask()) {
    return;
  }
  auto copies = copyIndices(call, indices);
  call.allocateResults();
  std::reverse(copies.begin(), copies.end());
  freeIndices(call, copies);
}

void indexPut(KernelCall& call, bool is_checked) {
  const Indices indices{call.argument(1)};
  call.allocateResults();
  if (indices.hasMask() || call.tensor(0).numel() == 0 || indices.count() == 0) {
    return;
  }
  if (call.argument(3).toBool()) {
    addBySortedIndex(call, indices, call.tensor(2), is_checked);
  } else {
    freeIndices(call, copyIndices(call, indices));
  }
}

void indexPutChecked(KernelCall& call) {
  indexPut(call, /*is_checked=*/true);
}

void indexPutImpl(KernelCall& call) {
  constexpr std::size_t kIsUnsafe = 4;
  indexPut(call, !call.argument(kIsUnsafe).toBool());
}

// A mean needs the number of values.
bool isMean(const KernelCall& call) {
  constexpr std::size_t kReduce = 4;
  return call.argument(kReduce).toStringRef() == "mean";
}

// `scatter_reduce_two()`: a one for each value, the counts, and a mask of counts that are zero.
void scatterReduce(KernelCall& call) {
  call.allocateResults();
  if (isMean(call)) {
    const BlockNumber ones = call.copy(call.tensor(3));
    const BlockNumber counts = call.copy(call.tensor(0));
    const BlockNumber are_zero = call.allocate(call.tensor(0).numel());
    call.free({are_zero, counts, ones});
  }
}

// `index_reduce_func_cuda_impl()`.
void indexReduce(KernelCall& call) {
  call.allocateResults();
  if (isMean(call)) {
    const BlockNumber counts = call.copy(call.tensor(0));
    call.free(call.copy(call.tensor(3)));
    call.allocateAndFree(call.tensor(0).numel());
    call.free(counts);
  }
}

// `masked_scatter_cuda_impl()`: for each element, the number of masked elements before it.
void maskedScatter(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  const Tensor& mask = call.tensor(1);
  if (self.numel() == 0) {
    return;
  }
  const BlockNumber before = call.allocate(self.numel() * kIndex);
  const bool is_ready = mask.numel() == self.numel() && mask.is_contiguous();
  const BlockNumber expanded = is_ready ? -1 : call.allocate(self.numel());
  call.allocateAndFree(cubScanBytes(self.numel(), kIndex));
  call.free({expanded, before});
}

// `roll_common()`: one dimension at a time.
void roll(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  const std::size_t count = call.argument(1).toIntVector().size();
  if (self.numel() == 0 || count == 0) {
    return;
  }
  const BlockNumber copy = self.is_contiguous() ? -1 : call.copy(self);
  std::vector<BlockNumber> rolled;
  for (std::size_t i = 0; i + 1 < count; ++i) {
    rolled.push_back(call.copy(self));
    if (i == 0) {
      call.free(copy);
    }
  }
  call.allocateResult(0);
  if (count == 1) {
    call.free(copy);
  }
  for (auto block = rolled.rbegin(); block != rolled.rend(); ++block) {
    call.free(*block);
  }
}

const KernelRules kIndexingRules{
    {index, {"aten::index.Tensor"}},
    {indexPutChecked, {"aten::index_put", "aten::index_put_"}},
    {indexPutImpl, {"aten::_index_put_impl_"}},
    {scatterReduce, {"aten::scatter_reduce.two", "aten::scatter_reduce_.two"}},
    {indexReduce, {"aten::index_reduce", "aten::index_reduce_"}},
    {maskedScatter, {"aten::masked_scatter_"}},
    {roll, {"aten::roll"}},
};

}  // namespace

}  // namespace torchext
