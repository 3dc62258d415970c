#include <string>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/enum_tag.h>

#include "../../core/fake/storage/fake_storage.h"
#include "../../libraries/support/operator_table.h"
#include "../../libraries/support/stack_utils.h"
#include "trial_hooks.h"

namespace torchext {

namespace {

// In-place operators that write to one element several times without an error, because they write the same value each
// time (`set_check_mem_overlap(false)`) or do not check.
const OperatorSet writesRepeatedly{
    "may write to one element several times: always the same value, or unchecked",
    {"aten::addmv_", "aten::baddbmm_", "aten::conj_physical_", "aten::fill_", "aten::index_fill_", "aten::index_put_",
     "aten::masked_fill_", "aten::nan_to_num_", "aten::threshold_", "aten::tril_", "aten::triu_", "aten::zero_"}};

bool isElementwise(const OperatorHandle& op) {
  return op.hasTag(at::Tag::pointwise) || op.schema().name() == "aten::copy_";
}

// Returns true for a PyTorch operator that refuses to write to one element several times.
bool refusesRepeatedWrites(const OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (namespaceOf(op.operator_name()) != "aten" || op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  return isElementwise(op) || (name.back() == '_' && name.rfind("aten::_", 0) != 0);
}

// The bytes that a tensor without gaps occupies.
struct Extent {
  std::size_t begin;
  std::size_t end;

  explicit Extent(const Tensor& tensor)
      : begin{toSize(tensor.storage_offset()) * tensor.itemsize()}, end{begin + tensor.nbytes()} {}
};

// Decides as `at::get_overlap_status()` does: it ignores tensors with gaps, and full overlap is harmless if the strides
// are equal.
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

// Returns true for a `copy_` that does nothing (`copy_impl()`, Copy.cpp).
bool copiesOntoItself(const OperatorHandle& op, const Stack& stack) {
  if (op.schema().name() != "aten::copy_") {
    return false;
  }
  const auto arguments = argumentsOf(op, stack);
  const Tensor& self = arguments[0].toTensor();
  const Tensor& source = arguments[1].toTensor();
  return self.has_storage() && source.has_storage() && isSameStorage(self.storage(), source.storage()) &&
         self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
         self.strides() == source.strides() && self.scalar_type() == source.scalar_type() &&
         self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
}

// Returns true for a call that computes into a temporary tensor (ATen's `unary_op_impl_with_complex_to_float_out()`).
bool makesFloatsOfComplex(const OperatorHandle& op, const Tensor& written, const Tensor& other) {
  const std::string& name = op.schema().name();
  return other.is_complex() && !written.is_complex() && (name == "aten::abs" || name == "aten::angle");
}

void checkInputs(const OperatorHandle& op, const Tensor& written, const Stack& stack) {
  forEachTensor(argumentsOf(op, stack), [&](const Tensor& other) {
    TORCH_CHECK(makesFloatsOfComplex(op, written, other) || !overlapsPartially(written, other),
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation.");
  });
}

}  // namespace

// Raises the kernels' error if the call would write to one element several times, or, elementwise, to memory that it
// also reads as another element (`TensorIteratorBase::compute_mem_overlaps()`). Most Meta kernels do not check, and
// PyTorch's own functions for it compare data pointers.
void refuseOverlap(const OperatorHandle& op, const Stack& stack) {
  if (writesRepeatedly(op)) {
    return;
  }
  const bool refuses_repeated = refusesRepeatedWrites(op);
  const bool is_elementwise = isElementwise(op);
  if ((!refuses_repeated && !is_elementwise) || copiesOntoItself(op, stack)) {
    return;
  }
  forEachWritten(op.schema(), argumentsOf(op, stack), [&](const Tensor& written, std::size_t /*position*/) {
    if (refuses_repeated) {
      at::assert_no_internal_overlap(written);
    }
    if (is_elementwise) {
      checkInputs(op, written, stack);
    }
  });
}

}  // namespace torchext
