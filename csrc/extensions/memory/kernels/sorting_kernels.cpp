// Sorts, scans, and kernels that use them: embeddings and sums by index.

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include <ATen/EmptyTensor.h>

#include "../../../core/support/sizes.h"
#include "arithmetic.h"
#include "cub_buffers.h"
#include "kernel_call.h"
#include "reduction_buffers.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;

constexpr std::int64_t kLong = 8;  // bytes

std::int64_t sliceSize(const Tensor& tensor, std::int64_t dim) {
  return tensor.dim() == 0 ? 1 : tensor.size(dim);
}

// Returns true if the elements of each slice are contiguous, without gaps.
bool hasCompactSlices(const Tensor& tensor, std::int64_t dim) {
  return tensor.dim() == 0 || (tensor.is_non_overlapping_and_dense() && tensor.stride(dim) == 1);
}

// `launch_stable_sort_kernel()`.
void sortCompactSlices(KernelCall& call, const Tensor& self, std::int64_t dim) {
  const std::int64_t size = sliceSize(self, dim);
  const std::int64_t count = self.numel();
  const std::int64_t key_bytes = toSigned(self.element_size());
  const CubSort sort{count, key_bytes, kLong, self.scalar_type() == at::kBool ? 8 : key_bytes * 8};
  const std::int64_t slices = count / size;
  constexpr std::int64_t kManySlices = 128;
  if (slices == 1 || slices >= kManySlices) {
    const BlockNumber indices = call.allocate(count * kLong);
    call.allocateAndFree(slices == 1 ? cubRadixSortBytes(sort) : cubSegmentedSortBytes(sort));
    call.free(indices);
    return;
  }
  // `segmented_sort_pairs_by_full_sort()`: sorts all elements together, then by slice.
  const BlockNumber places = call.allocate(count * kLong);
  const BlockNumber sorted_places = call.allocate(count * kLong);
  const BlockNumber keys = call.allocate(count * key_bytes);
  call.allocateAndFree(cubRadixSortBytes(sort));
  call.free(keys);
  call.allocateAndFree(cubRadixSortBytes({count, kLong, 0, countBits(slices)}));
  call.free({sorted_places, places});
}

// The allocations of a sort after its results (`sort_cuda_kernel()`). Slices of up to 4096 elements are sorted in place
// (`sortKeyValueInplace()`); larger ones in a copy, unless their elements are contiguous.
void sortSlices(KernelCall& call, const Tensor& self, std::int64_t dim) {
  constexpr std::int64_t kInPlace = 4096;
  if (self.numel() == 0) {
    return;
  }
  if (sliceSize(self, dim) <= kInPlace) {
    call.allocateAndFree(sliceSize(self, dim) * kLong);
    return;
  }
  const bool is_ready = hasCompactSlices(self, dim);
  const BlockNumber copy = is_ready ? -1 : call.copy(self);
  const bool goes_beside = !is_ready && !hasCompactSlices(call.result(), dim);
  const BlockNumber values = goes_beside ? call.copy(self) : -1;
  const BlockNumber indices = goes_beside ? call.allocate(self.numel() * kLong) : -1;
  sortCompactSlices(call, self, dim);
  call.free({indices, values, copy});
}

void sortStable(KernelCall& call) {
  call.allocateResults();
  sortSlices(call, call.tensor(0), call.argument(2).toInt());
}

void sort(KernelCall& call) {
  call.allocateResults();
  sortSlices(call, call.tensor(0), call.argument(1).toInt());
}

// `median_impl()` sorts all elements and checks whether the last is NaN.
void medianOfAll(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  if (self.numel() == 0) {
    return;
  }
  const BlockNumber copy = call.copyUnlessContiguous(self);
  const BlockNumber sorted = call.copy(self);
  const BlockNumber indices = call.allocate(self.numel() * kLong);
  sortSlices(call, at::detail::empty_meta({self.numel()}, self.scalar_type()), 0);
  call.free(indices);
  const BlockNumber is_nan = call.allocate(1);
  call.allocateResult(0);
  call.free({is_nan, sorted, copy});
}

// `mode_kernel_impl()` moves the dimension to the end.
void mode(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  if (self.dim() > 0 && self.numel() > 0) {
    const Tensor& last = self.transpose(call.argument(1).toInt(), -1);
    call.free(last.is_contiguous() ? -1 : call.copy(self));
  }
}

void kthValue(KernelCall& call) {
  const Tensor& self = call.tensor(0);
  const BlockNumber copy = call.copyUnlessContiguous(self);
  call.allocateResults();
  call.free(copy);
}

// `searchsorted_maybe_trim_input_tensors()`.
template <std::size_t Values, std::size_t Boundaries>
void search(KernelCall& call) {
  call.allocateResults();
  const Tensor& values = call.tensor(Values);
  const Tensor& boundaries = call.tensor(Boundaries);
  const BlockNumber contiguous_values = call.copyUnlessContiguous(values);
  const BlockNumber contiguous_boundaries = call.copyUnlessContiguous(boundaries);
  const c10::ScalarType common = c10::promoteTypes(values.scalar_type(), boundaries.scalar_type());
  const auto cast = [&call, common](const Tensor& tensor) {
    const auto element = toSigned(c10::elementSize(common));
    return tensor.scalar_type() == common ? -1 : call.allocate(tensor.numel() * element);
  };
  const BlockNumber cast_values = cast(values);
  const BlockNumber cast_boundaries = cast(boundaries);
  call.free({cast_boundaries, cast_values, contiguous_boundaries, contiguous_values});
}

// `cummax()` and `cummin()` scan a contiguous tensor.
void cumulateExtremum(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  call.free(call.copyUnlessContiguous(self));
}

// `should_use_multiblock()` in TensorTopK.cu.
bool usesManyBlocks(std::int64_t slices, std::int64_t size) {
  struct Limit {
    std::int64_t slices;
    std::int64_t size;
  };
  constexpr std::array<Limit, 7> kLimits{{{20, 20000},
                                          {40, 10000},
                                          {80, 8000},
                                          {199, 5000},
                                          {799, 3000},
                                          {4000, 800},
                                          {std::numeric_limits<std::int64_t>::max(), 400}}};
  const auto* limit =
      std::find_if(kLimits.begin(), kLimits.end(), [slices](const Limit& entry) { return slices <= entry.slices; });
  return size >= limit->size;
}

void topk(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  if (self.numel() == 0 || self.dim() == 0) {
    return;
  }
  const BlockNumber copy = call.copyUnlessContiguous(self);
  const std::int64_t size = sliceSize(self, call.argument(2).toInt());
  const std::int64_t slices = self.numel() / size;
  if (usesManyBlocks(slices, size)) {
    constexpr std::int64_t kThreads = 256;
    constexpr std::int64_t kDigits = 256;
    constexpr std::int64_t kBlocksPerMultiprocessor = 6;  // 65536 registers, 40 per thread
    const std::int64_t items = std::clamp<std::int64_t>(
        divideRoundingUp(self.numel(), call.gpu.multiprocessors * kBlocksPerMultiprocessor * kThreads), 4, 64);
    const std::int64_t blocks = slices * divideRoundingUp(size, items * kThreads);
    const auto element = toSigned(self.element_size());
    std::vector<BlockNumber> buffers;
    for (const std::int64_t bytes : {slices * element, slices * 8, slices * 2 * std::max<std::int64_t>(element, 4),
                                     blocks * kDigits * 2, slices * kDigits * 4, blocks * 4, blocks * 4}) {
      buffers.push_back(call.allocate(bytes));
    }
    call.allocateAndFree(cubScanBytes(blocks, kLong));
    call.allocateAndFree(cubScanBytes(blocks, kLong));
    for (auto buffer = buffers.rbegin(); buffer != buffers.rend(); ++buffer) {
      call.free(*buffer);
    }
  }
  call.free(copy);
}

// CUB scans vectors only: `scan_dim()` in ScanUtils.cuh. Sums of integers are computed in 8 bytes.
void cumulate(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  const Tensor& result = call.result();
  if (self.numel() == 0 || self.dim() == 0) {
    return;
  }
  const BlockNumber cast = self.scalar_type() == result.scalar_type() ? -1 : call.copy(result);
  const BlockNumber copy = cast >= 0 ? -1 : call.copyUnlessContiguous(self);
  if (self.numel() == sliceSize(self, call.argument(1).toInt())) {
    call.allocateAndFree(cubScanBytes(self.numel(), toSigned(result.element_size())));
  }
  call.free({copy, cast});
}

// Indices sorted to sum the gradients of equal rows.
struct SortedIndices {
  BlockNumber sorted;
  BlockNumber original;
};

SortedIndices sortIndices(KernelCall& call, const Tensor& indices, std::int64_t largest) {
  const std::int64_t count = indices.numel();
  const auto element = toSigned(indices.element_size());
  const BlockNumber sorted = call.allocate(count * element);
  const BlockNumber original = call.allocate(count * element);
  const BlockNumber range = call.allocate(count * element);
  call.allocateAndFree(cubRadixSortBytes({count, element, element, countBits(largest)}));
  call.free(range);
  return {sorted, original};
}

// `embedding_backward_cuda_kernel()`: sums rows in segments of up to 10, and then the segments of each row.
void addUpSegments(KernelCall& call, const Tensor& gradient, const Tensor& indices, std::int64_t rows) {
  call.allocateResults();
  constexpr std::int64_t kRowsOfSegment = 10;
  const std::int64_t count = indices.numel();
  const auto element = toSigned(indices.element_size());
  const BlockNumber offsets = call.allocate(count * element);
  const BlockNumber num_segments = call.allocate(kLong);
  const BlockNumber unique = call.allocate(count * element);
  call.allocateAndFree(cubUniqueByKeyBytes(count));
  call.free(unique);
  const std::int64_t segments = std::min(count, rows);
  const BlockNumber partials = call.allocate(segments * element);
  const BlockNumber partial_offsets = call.allocate(segments * element);
  call.allocateAndFree(cubScanBytes(segments, element));
  const BlockNumber num_partials = call.allocate(kLong);
  const std::int64_t parts = (count / kRowsOfSegment) + segments;
  const BlockNumber starts = call.allocate(parts * element);
  const std::int64_t sum_bytes = accumulatorBytes(gradient.scalar_type());
  const BlockNumber sums = call.allocate(parts * gradient.size(-1) * sum_bytes);
  call.free({sums, starts, num_partials, partial_offsets, partials, num_segments, offsets});
}

// Counts the occurrences of each index: scans upwards and spreads downwards.
BlockNumber countIndices(KernelCall& call, const Tensor& indices) {
  const BlockNumber counts = call.copy(indices);
  call.allocateAndFree(cubScanByKeyBytes(indices.numel()));
  call.allocateAndFree(cubScanByKeyBytes(indices.numel()));
  return counts;
}

void embeddingBackward(KernelCall& call) {
  const Tensor& gradient = call.tensor(0);
  const Tensor& indices = call.tensor(1);
  const std::int64_t rows = call.argument(2).toInt();
  constexpr std::int64_t kWithoutSort = 3072;
  const BlockNumber contiguous = call.copyUnlessContiguous(gradient);
  if (indices.numel() <= kWithoutSort && !call.argument(4).toBool()) {
    const BlockNumber copy = call.copyUnlessContiguous(indices);
    call.allocateResults();
    call.free({copy, contiguous});
    return;
  }
  const SortedIndices sorted = sortIndices(call, indices, rows);
  const BlockNumber counts = call.argument(4).toBool() ? countIndices(call, indices) : -1;
  addUpSegments(call, gradient, indices, rows);
  call.free({counts, sorted.original, sorted.sorted, contiguous});
}

void embeddingBag(KernelCall& call) {
  call.allocateResults({2, 1});
  call.allocateResults();
}

// For the operators with and without the argument `offsets`. `kRows` is the index of the number of rows.
template <std::size_t kRows>
void embeddingBagBackward(KernelCall& call) {
  constexpr std::size_t kByFrequency = kRows + 1;
  constexpr std::size_t kMode = kRows + 2;
  constexpr std::int64_t kMax = 2;
  const Tensor& gradient = call.tensor(0);
  const Tensor& indices = call.tensor(1);
  const std::int64_t rows = call.argument(kRows).toInt();
  const BlockNumber contiguous = call.copyUnlessContiguous(gradient);
  if (call.argument(kMode).toInt() == kMax) {  // summed by atomic operations
    call.allocateResults();
    call.free(contiguous);
    return;
  }
  const SortedIndices sorted = sortIndices(call, indices, rows);
  const BlockNumber counts = call.argument(kByFrequency).toBool() ? countIndices(call, indices) : -1;
  addUpSegments(call, gradient, indices, rows);
  call.free({counts, sorted.original, sorted.sorted, contiguous});
}

const KernelRules kSortingRules{
    {sort, {"aten::sort"}},
    {sortStable, {"aten::sort.stable"}},
    {topk, {"aten::topk"}},
    {cumulate, {"aten::cumsum", "aten::cumprod", "aten::_logcumsumexp"}},
    {cumulateExtremum, {"aten::cummax", "aten::cummin"}},
    {medianOfAll, {"aten::median"}},
    {mode, {"aten::mode"}},
    {kthValue, {"aten::kthvalue"}},
    {search<0, 1>, {"aten::bucketize.Tensor"}},
    {search<1, 0>, {"aten::searchsorted.Tensor"}},
    {embeddingBackward, {"aten::embedding_dense_backward"}},
    {embeddingBag, {"aten::_embedding_bag"}},
    {embeddingBagBackward<6>, {"aten::_embedding_bag_backward"}},
    {embeddingBagBackward<5>, {"aten::_embedding_bag_dense_backward"}},
};

}  // namespace

}  // namespace torchext
