#include "sparse_remedies.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "../../core/fake/meta/device_rules.h"
#include "../../core/fake/meta/meta_call.h"
#include "../../libraries/support/stack_utils.h"
#include "../values/follow_values.h"
#include "sparse_fakes.h"

namespace torchext {

using c10::Layout;

namespace {

enum class Kind : std::uint8_t {
  // The argument and the result are strided. The result has the metadata that the operator returns for strided
  // arguments of the same shapes.
  kLikeStrided,
  // The same for a product of matrices, whose dtypes must be equal.
  kProduct,
  // The argument is sparse. The result has the same indices, and other values in the dtype of the first argument.
  kLikeArgument,
  // Two COO tensors on CUDA. The result has the elements of both, unless these are more than the tensor has places
  // (`add_out_sparse_cuda()`). CPU kernels merge elements with equal indices.
  kJoined,
  // The argument is compressed. The result has the same elements, compressed along the other dimension.
  kRecompressed,
};

struct Remedy {
  std::string_view op;
  Kind kind;
  std::size_t argument = 0;
  Layout layout = c10::kStrided;  // of the argument, if it is recompressed
};

constexpr std::array kRemedies{
    Remedy{"aten::add", Kind::kLikeStrided, 0},
    Remedy{"aten::add", Kind::kLikeStrided, 1},
    Remedy{"aten::add_", Kind::kLikeStrided, 0},
    Remedy{"aten::add", Kind::kJoined},
    Remedy{"aten::add_", Kind::kJoined},
    Remedy{"aten::sub", Kind::kJoined},
    Remedy{"aten::sub_", Kind::kJoined},
    Remedy{"aten::addmm", Kind::kProduct, 0},
    Remedy{"aten::addmm_", Kind::kProduct, 0},
    Remedy{"aten::addmv", Kind::kProduct, 0},
    Remedy{"aten::bmm", Kind::kProduct, 1},
    Remedy{"aten::mm", Kind::kProduct, 1},
    Remedy{"aten::sub", Kind::kLikeStrided, 0},
    Remedy{"aten::sub_", Kind::kLikeStrided, 0},
    Remedy{"aten::_sparse_log_softmax", Kind::kLikeArgument},
    Remedy{"aten::_sparse_softmax", Kind::kLikeArgument},
    Remedy{"aten::sparse_mask", Kind::kLikeArgument, 1},
    Remedy{"aten::sparse_sampled_addmm", Kind::kLikeArgument},
    Remedy{"aten::_to_sparse_bsc", Kind::kRecompressed, 0, c10::kSparseBsr},
    Remedy{"aten::_to_sparse_bsr", Kind::kRecompressed, 0, c10::kSparseBsc},
    Remedy{"aten::_to_sparse_csc", Kind::kRecompressed, 0, c10::kSparseCsr},
    Remedy{"aten::_to_sparse_csr", Kind::kRecompressed, 0, c10::kSparseCsc},
};

// (self, other, alpha). For integers and complex factors, PyTorch checks more.
bool canJoin(ArrayRef<IValue> arguments) {
  const Tensor& a = arguments[0].toTensor();
  const IValue& other = arguments[1];
  if (!other.isTensor() || !a.is_floating_point() || arguments[2].toScalar().isComplex() ||
      a.layout() != c10::kSparse || other.toTensor().layout() != c10::kSparse) {
    return false;
  }
  const Tensor& b = other.toTensor();
  return a.is_cuda() && b.is_cuda() && a.sizes() == b.sizes() && a.sparse_dim() == b.sparse_dim() &&
         a.scalar_type() == b.scalar_type() && a._nnz() > 0 && b._nnz() > 0 && a._nnz() + b._nnz() <= a.numel();
}

bool fits(const Remedy& remedy, const OperatorHandle& op, ArrayRef<IValue> arguments) {
  if (op.schema().name() != remedy.op || !arguments[remedy.argument].isTensor()) {
    return false;
  }
  const Tensor& argument = arguments[remedy.argument].toTensor();
  switch (remedy.kind) {
    case Kind::kLikeStrided:
    case Kind::kProduct:
      return argument.layout() == c10::kStrided;
    case Kind::kLikeArgument:
      return isSparse(argument);
    case Kind::kJoined:
      return canJoin(arguments);
    case Kind::kRecompressed:
      return argument.layout() == remedy.layout;
  }
  return false;
}

const Remedy* findRemedy(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const auto found = std::find_if(kRemedies.begin(), kRemedies.end(),
                                  [&](const Remedy& remedy) { return fits(remedy, op, arguments); });
  return found == kRemedies.end() ? nullptr : &*found;
}

Tensor recompressed(const Tensor& self) {
  const auto& source = dynamic_cast<const at::SparseCsrTensorImpl&>(*self.unsafeGetTensorImpl());
  const Layout layout = at::sparse_csr::flip_compressed_layout(self.layout());
  const bool has_blocks = layout == c10::kSparseBsr || layout == c10::kSparseBsc;
  const std::int64_t along = at::sparse_csr::isCompressedRow(layout) ? 0 : 1;
  const std::int64_t batch = source.batch_dim();
  const std::int64_t block = has_blocks ? source.values().size(batch + 1 + along) : 1;
  std::vector<std::int64_t> size = source.compressed_indices().sizes().vec();
  size.back() = self.size(batch + along) / block + 1;
  return at::_sparse_compressed_tensor_unsafe(
      at::empty(size, source.compressed_indices().options()), at::empty_like(source.plain_indices()),
      at::empty_like(source.values(), at::MemoryFormat::Contiguous), self.sizes(), self.options().layout(layout));
}

// The factor `alpha` does not change the metadata.
Tensor joined(const OperatorHandle& op, const Tensor& self, const Tensor& other) {
  const Tensor indices = at::cat({self._indices(), other._indices()}, 1);
  const Tensor values = at::cat({self._values(), other._values()});
  if (op.schema().name().back() != '_') {
    return at::_sparse_coo_tensor_unsafe(indices, values, self.sizes(), self.options());
  }
  dynamic_cast<at::SparseTensorImpl&>(*self.unsafeGetTensorImpl()).set_indices_and_values_unsafe(indices, values);
  return self;
}

// Raises the error of PyTorch's kernels, which access all elements in the dtype of the sparse matrix.
void checkDtypes(ArrayRef<IValue> arguments) {
  std::optional<c10::ScalarType> expected;
  forEachTensor(arguments,
                [&expected](const Tensor& tensor) { expected = isSparse(tensor) ? tensor.scalar_type() : expected; });
  forEachTensor(arguments, [&expected](const Tensor& tensor) {
    TORCH_CHECK(tensor.scalar_type() == *expected, "expected scalar type ", *expected, " but found ",
                tensor.scalar_type());
  });
}

void runLikeStrided(const OperatorHandle& op, Stack& stack) {
  const auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const Stack arguments(stack.end() - count, stack.end());
  runOnMeta(op, stack);
  followValues(op, arguments, topOf(stack, op.schema().returns().size()));
}

}  // namespace

const OperatorSet countsElements{
    "read the memory of sparse tensors to count the elements of their result",
    {"aten::_coalesce", "aten::_sparse_sparse_matmul", "aten::add", "aten::add_", "aten::addmm", "aten::addmm_",
     "aten::hspmm", "aten::index_select", "aten::mul", "aten::mul_", "aten::sspaddmm", "aten::sub", "aten::sub_"}};

bool hasRemedy(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  return findRemedy(op, arguments) != nullptr;
}

bool hasRemedyForElements(const OperatorHandle& op, ArrayRef<IValue> arguments) {
  const Remedy* remedy = findRemedy(op, arguments);
  return remedy != nullptr && (remedy->kind == Kind::kLikeStrided || remedy->kind == Kind::kProduct);
}

void applyRemedy(const OperatorHandle& op, Stack& stack) {
  const std::size_t count = op.schema().arguments().size();
  const Remedy& remedy = *findRemedy(op, topOf(stack, count));
  if (remedy.kind == Kind::kProduct) {
    checkDtypes(topOf(stack, count));
  }
  if (remedy.kind == Kind::kLikeStrided || remedy.kind == Kind::kProduct) {
    runLikeStrided(op, stack);
    return;
  }
  const Tensor argument = topOf(stack, count)[remedy.argument].toTensor();
  const IValue second = topOf(stack, count)[1];
  DeviceRules(op, stack).outputDevice();  // raises for arguments on different devices
  const auto dtype = topOf(stack, count).front().toTensor().scalar_type();
  torch::jit::drop(stack, count);
  torch::jit::push(stack, remedy.kind == Kind::kRecompressed ? recompressed(argument)
                          : remedy.kind == Kind::kJoined     ? joined(op, argument, second.toTensor())
                                                             : argument.clone().to(dtype));
}

}  // namespace torchext
