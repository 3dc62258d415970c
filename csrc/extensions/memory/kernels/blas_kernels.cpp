// Matrix products: Blas.cpp in ATen/native/cuda.

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include <ATen/ExpandUtils.h>

#include "../../../core/torch_internals/torch_compat.h"
#include "blas_workspace.h"
#include "kernel_call.h"

namespace torchext {

using at::Tensor;

namespace {

using BlockNumber = KernelCall::BlockNumber;
using Library = BlasWorkspace::Library;

bool isFloatingForLt(c10::ScalarType dtype) {
  return dtype == at::kDouble || dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
}

bool isLtDisabled() {
  static const char* value = std::getenv("DISABLE_ADDMM_CUDA_LT");
  return value != nullptr && std::string_view{value} == "1";
}

bool isLeading(std::int64_t stride, std::int64_t size) {
  return stride >= std::max<std::int64_t>(1, size);
}

// `prepare_matrix_for_cublas()` copies matrices without compact rows or columns.
BlockNumber prepareMatrix(KernelCall& call, const Tensor& matrix) {
  const auto strides = matrix.strides();
  const auto sizes = matrix.sizes();
  const bool is_readable = matrix.is_non_overlapping_and_dense() ||
                           (strides[0] == 1 && isLeading(strides[1], sizes[0])) ||
                           (strides[1] == 1 && isLeading(strides[0], sizes[1]));
  return is_readable ? -1 : call.copy(matrix);
}

// Whether `prepare_matrix_for_cublas()` reads a result as transposed.
bool isTransposedResult(const Tensor& result) {
  if (result.is_non_overlapping_and_dense()) {
    return result.is_contiguous();
  }
  return !(result.stride(0) == 1 && isLeading(result.stride(1), result.size(0)));
}

// The arguments and the result as `cublasCommonArgs` holds them during a product.
class PreparedMatrices {
 public:
  PreparedMatrices(KernelCall& call, const Tensor& mat1, const Tensor& mat2, const Tensor& result) : call_{call} {
    result_ = prepareMatrix(call, result);
    const bool is_transposed = isTransposedResult(result);
    first_ = prepareMatrix(call, is_transposed ? mat2 : mat1);
    second_ = prepareMatrix(call, is_transposed ? mat1 : mat2);
  }
  C10_DISABLE_COPY_AND_ASSIGN(PreparedMatrices);
  ~PreparedMatrices() {
    call_.free({result_, second_, first_});  // members of a struct, freed in reverse order
  }

 private:
  KernelCall& call_;
  BlockNumber result_;
  BlockNumber first_;
  BlockNumber second_;
};

void multiply(KernelCall& call, const Tensor& mat1, const Tensor& mat2, const Tensor& result, Library library) {
  if (result.numel() == 0 || mat1.numel() == 0) {
    return;
  }
  const PreparedMatrices matrices{call, mat1, mat2, result};
  callBlas(call, library);
}

// `isInputCompliesAddmmCudaLt()`: whether cuBLASLt adds the bias in the product.
bool addsBiasByLt(
    const Tensor& self, const Tensor& mat1, const Tensor& mat2, const Tensor& result, const c10::Scalar& beta) {
  const bool is_possible = !isLtDisabled() && isFloatingForLt(mat1.scalar_type()) && result.dim() == 2 &&
                           result.is_contiguous() && self.is_contiguous() && mat2.size(0) > 1 && mat2.size(1) > 1;
  if (!is_possible || self.dim() == 0) {
    return false;
  }
  const bool is_vector = self.dim() == 1 || (self.dim() == 2 && self.size(0) == 1);
  if (is_vector && self.size(-1) == mat2.size(1) && beta.toComplexDouble() == 1.0) {
    return true;
  }
  return compat::applies("matrices_as_bias") && c10::isReducedFloatingType(mat1.scalar_type()) && self.dim() == 2 &&
         self.sizes() == result.sizes() && self.size(0) > 1;
}

void mm(KernelCall& call) {
  call.allocateResults();
  multiply(call, call.tensor(0), call.tensor(1), call.result(), Library::kCublas);
}

void addmm(KernelCall& call) {
  call.allocateResults();
  const Tensor& self = call.tensor(0);
  const bool uses_lt = addsBiasByLt(self, call.tensor(1), call.tensor(2), call.result(), call.argument(3).toScalar());
  multiply(call, call.tensor(1), call.tensor(2), call.result(), uses_lt ? Library::kCublasLt : Library::kCublas);
}

// The target of an in-place addition is never a bias for cuBLASLt.
void addmmInPlace(KernelCall& call) {
  call.allocateResults();
  multiply(call, call.tensor(1), call.tensor(2), call.tensor(0), Library::kCublas);
}

// `prepare_batch_matrix_for_cublas()`.
BlockNumber prepareBatch(KernelCall& call, const Tensor& batch, bool is_transposed, std::int64_t m, std::int64_t n) {
  const auto strides = batch.strides();
  const std::size_t fast = is_transposed ? 2 : 1;
  const std::size_t leading = is_transposed ? 1 : 2;
  const bool is_readable = (strides[fast] == 1 && isLeading(strides[leading], m)) ||
                           (strides[leading] == 1 && isLeading(strides[fast], n)) ||
                           (batch.is_contiguous() && strides[1] != 0 && strides[2] != 0);
  return is_readable ? -1 : call.copy(batch);
}

// `baddbmm_out_cuda_impl()`.
void multiplyBatches(KernelCall& call, const Tensor& batch1, const Tensor& batch2, const Tensor& result) {
  if (result.numel() == 0 || batch1.size(2) == 0) {
    return;
  }
  const auto strides = result.strides();
  const auto sizes = result.sizes();
  const bool is_plain = strides[1] == 1 && (sizes[2] == 1 || isLeading(strides[2], sizes[1]));
  const bool is_transposed = !is_plain && strides[2] == 1 && (sizes[1] == 1 || isLeading(strides[1], sizes[2]));
  const BlockNumber copy = is_plain || is_transposed ? -1 : call.copy(result);
  const Tensor& first = is_transposed ? batch2 : batch1;
  const Tensor& second = is_transposed ? batch1 : batch2;
  const std::size_t leading = is_transposed ? 1 : 2;
  const std::int64_t m = sizes[is_transposed ? 2 : 1];
  const std::int64_t n = sizes[leading];
  const std::int64_t k = first.sizes()[leading];
  const BlockNumber first_copy = prepareBatch(call, first, is_transposed, m, k);
  const BlockNumber second_copy = prepareBatch(call, second, is_transposed, k, n);
  callBlas(call);
  call.free({second_copy, first_copy, copy});
}

void bmm(KernelCall& call) {
  call.allocateResults();
  multiplyBatches(call, call.tensor(0), call.tensor(1), call.result());
}

void baddbmm(KernelCall& call) {
  call.allocateResults();
  multiplyBatches(call, call.tensor(1), call.tensor(2), call.result());
}

// `addmm` of each pair of matrices, accumulated in the result.
void addbmm(KernelCall& call) {
  call.allocateResults();
  const Tensor& batch1 = call.tensor(1);
  const Tensor& batch2 = call.tensor(2);
  for (std::int64_t i = 0; i < batch1.size(0); ++i) {
    multiply(call, batch1.select(0, i), batch2.select(0, i), call.result(), Library::kCublas);
  }
}

// `addmv_out_cuda` copies matrices without compact rows or columns, and vectors with stride 0.
void multiplyByVector(KernelCall& call, const Tensor& matrix, const Tensor& vector) {
  if (call.result().numel() == 0 || matrix.numel() == 0) {
    return;
  }
  const auto strides = matrix.strides();
  const auto sizes = matrix.sizes();
  const bool is_plain = strides[0] == 1 && isLeading(strides[1], sizes[0]);
  const bool is_transposed = strides[1] == 1 && isLeading(strides[0], sizes[1]);
  const BlockNumber vector_copy = vector.stride(0) == 0 ? call.copy(vector) : -1;
  const BlockNumber matrix_copy = is_plain || is_transposed ? -1 : call.copy(matrix);
  callBlas(call);
  call.free({matrix_copy, vector_copy});
}

void mv(KernelCall& call) {
  call.allocateResults();
  multiplyByVector(call, call.tensor(0), call.tensor(1));
}

void addmv(KernelCall& call) {
  call.allocateResults();
  multiplyByVector(call, call.tensor(1), call.tensor(2));
}

void dot(KernelCall& call) {
  call.allocateResults();
  callBlas(call);
}

const KernelRules kBlasRules{
    {mm, {"aten::mm", "aten::mm.out", "aten::mm.dtype", "aten::mm.dtype_out"}},
    {addmm, {"aten::addmm", "aten::addmm.out", "aten::addmm.dtype", "aten::_addmm_activation"}},
    {addmmInPlace, {"aten::addmm_"}},
    {bmm, {"aten::bmm", "aten::bmm.out", "aten::bmm.dtype"}},
    {baddbmm, {"aten::baddbmm", "aten::baddbmm.out", "aten::baddbmm_"}},
    {addbmm, {"aten::addbmm", "aten::addbmm_"}},
    {mv, {"aten::mv"}},
    {addmv, {"aten::addmv", "aten::addmv_", "aten::addmv.out"}},
    {dot, {"aten::dot", "aten::vdot"}},
};

}  // namespace

}  // namespace torchext
