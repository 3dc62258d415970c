#include "memory_overlap.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/enum_tag.h>
#include <c10/util/irange.h>

#include "../stack_utils.h"
#include "fake_storage.h"

namespace torchext {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

namespace {

// Elementwise, but not tagged so.
constexpr std::array<std::string_view, 3> kElementwise{"aten::copy_", "aten::fill_", "aten::zero_"};

bool isElementwise(const OperatorHandle& op) {
  return op.hasTag(at::Tag::pointwise) ||
         std::find(kElementwise.begin(), kElementwise.end(), op.schema().name()) != kElementwise.end();
}

// The bytes that a tensor without gaps occupies.
struct Extent {
  std::size_t begin;
  std::size_t end;

  explicit Extent(const Tensor& tensor)
      : begin{static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize()}, end{begin + tensor.nbytes()} {}
};

// As `at::get_overlap_status()`: tensors with gaps are too hard to tell, and one that covers the other is no harm.
bool overlapsPartially(const Tensor& a, const Tensor& b) {
  if (a.is_same(b) || !a.has_storage() || !b.has_storage() || !isSameStorage(a.storage(), b.storage()) ||
      a.numel() == 0 || b.numel() == 0 || !a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense()) {
    return false;
  }
  const Extent first{a};
  const Extent second{b};
  if (first.begin == second.begin && first.end == second.end) {
    return a.strides() != b.strides();
  }
  return first.begin < second.end && second.begin < first.end;
}

void checkWritten(const Tensor& written, const Stack& stack, std::size_t count) {
  at::assert_no_internal_overlap(written);
  forEachTensor(stack, count, [&written](const Tensor& other) {
    TORCH_CHECK(!overlapsPartially(written, other),
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation.");
  });
}

}  // namespace

void checkMemoryOverlap(const OperatorHandle& op, const Stack& stack) {
  if (!isElementwise(op)) {
    return;
  }
  const auto& arguments = op.schema().arguments();
  for (const auto i : c10::irange(arguments.size())) {
    if (isWritten(arguments[i])) {
      forEachTensor(torch::jit::peek(stack, i, arguments.size()),
                    [&](const Tensor& written) { checkWritten(written, stack, arguments.size()); });
    }
  }
}

}  // namespace torchext
