"""Memory of matrix products (Blas.cpp in ATen/native/cuda) and of attention."""

from __future__ import annotations

import math
import os
import re
import struct
from functools import cache, partial
from warnings import warn

import torch

from ....internals.patching import DIFFERENCES
from .calls import Geometry, Gpu, KernelCall, divide_up, is_reduced, rule

__all__ = ["call_blas", "cublas_bytes", "cublaslt_bytes"]

DTYPES_OF_LT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@cache
def _is_lt_disabled() -> bool:
    return os.environ.get("DISABLE_ADDMM_CUDA_LT") == "1"


def _is_leading(stride: int, size: int) -> bool:
    return stride >= max(1, size)


def _has_columns(matrix: Geometry) -> bool:
    return matrix.strides[0] == 1 and _is_leading(matrix.strides[1], matrix.sizes[0])


def _has_rows(matrix: Geometry) -> bool:
    return matrix.strides[1] == 1 and _is_leading(matrix.strides[0], matrix.sizes[1])


def _prepare_matrix(call: KernelCall, matrix: Geometry) -> int:
    """Copy a matrix without compact rows or columns, as `prepare_matrix_for_cublas()` does."""
    return call.copy_unless(_has_rows(matrix) or _has_columns(matrix) or matrix.is_dense(), matrix)


def _multiply(call: KernelCall, mat1: Geometry, mat2: Geometry, result: Geometry, *, is_lt: bool = False) -> None:
    """Prepare the matrices as `cublasCommonArgs` holds them, and multiply them."""
    if result.numel == 0 or mat1.numel == 0:
        return
    is_transposed = result.is_contiguous() if result.is_dense() else not _has_columns(result)
    in_order = (result, mat2, mat1) if is_transposed else (result, mat1, mat2)
    of_result, first, second = [_prepare_matrix(call, matrix) for matrix in in_order]
    call_blas(call, is_lt=is_lt)
    call.free(of_result, second, first)  # members of a struct, freed in reverse order


def _adds_bias_by_lt(bias: Geometry, mat1: Geometry, mat2: Geometry, result: Geometry, beta: complex) -> bool:
    """Follow `isInputCompliesAddmmCudaLt()`: return true if cuBLASLt adds the bias in the product."""
    is_possible = not _is_lt_disabled() and mat1.dtype in DTYPES_OF_LT and min(mat2.sizes) > 1
    if not is_possible or bias.dim not in (1, 2) or not (result.is_contiguous() and bias.is_contiguous()):
        return False
    is_vector = bias.dim == 1 or bias.sizes[0] == 1
    if is_vector and bias.sizes[-1] == mat2.sizes[1] and beta == 1:
        return True
    is_matrix = [*bias.sizes] == [*result.sizes] and bias.sizes[0] > 1
    return DIFFERENCES["matrices_as_bias"].applies and is_reduced(mat1.dtype) and is_matrix


@rule("mm", "mm.out", "mm.dtype", "mm.dtype_out")
def _mm(call: KernelCall) -> None:
    call.allocate_results()
    _multiply(call, call.tensor(0), call.tensor(1), call.result())


@rule("addmm", "addmm.out", "addmm.dtype", "_addmm_activation")
def _addmm(call: KernelCall) -> None:
    call.allocate_results()
    (bias, mat1, mat2, beta), result = call.arguments[:4], call.result()
    _multiply(call, mat1, mat2, result, is_lt=_adds_bias_by_lt(bias, mat1, mat2, result, beta))


@rule("addmm_")
def _addmm_in_place(call: KernelCall) -> None:
    # The target is never a bias for cuBLASLt.
    call.allocate_results()
    _multiply(call, call.tensor(1), call.tensor(2), call.tensor(0))


def _prepare_batch(call: KernelCall, batch: Geometry, is_transposed: bool, m: int, n: int) -> None:
    """Follow `prepare_batch_matrix_for_cublas()`."""
    strides = batch.strides
    fast, leading = (2, 1) if is_transposed else (1, 2)
    is_readable = (
        (strides[fast] == 1 and _is_leading(strides[leading], m))
        or (strides[leading] == 1 and _is_leading(strides[fast], n))
        or (batch.is_contiguous() and strides[1] != 0 and strides[2] != 0)
    )
    call.copy_unless(is_readable, batch)


def _multiply_batches(call: KernelCall, *, first: int) -> None:
    """Follow `baddbmm_out_cuda_impl()`. `first` is the index of the first batch among the arguments."""
    call.allocate_results()
    batch1, batch2, result = call.tensor(first), call.tensor(first + 1), call.result()
    if result.numel == 0 or batch1.sizes[2] == 0:
        return
    strides, sizes = result.strides, result.sizes
    is_plain = strides[1] == 1 and (sizes[2] == 1 or _is_leading(strides[2], sizes[1]))
    is_transposed = not is_plain and strides[2] == 1 and (sizes[1] == 1 or _is_leading(strides[1], sizes[2]))
    call.copy_unless(is_plain or is_transposed, result)
    left, right = (batch2, batch1) if is_transposed else (batch1, batch2)
    rows, leading = (2, 1) if is_transposed else (1, 2)
    m, n, k = sizes[rows], sizes[leading], left.sizes[leading]
    _prepare_batch(call, left, is_transposed, m, k)
    _prepare_batch(call, right, is_transposed, k, n)
    call_blas(call)


rule("bmm", "bmm.out", "bmm.dtype")(partial(_multiply_batches, first=0))
rule("baddbmm", "baddbmm.out", "baddbmm_")(partial(_multiply_batches, first=1))


@rule("addbmm", "addbmm_")
def _addbmm(call: KernelCall) -> None:
    # `addmm` of each pair of matrices, accumulated in the result.
    call.allocate_results()
    batches = call.arguments[1:3]
    first, second = (Geometry(batch.sizes[1:], batch.strides[1:], batch.dtype) for batch in batches)
    for _ in range(batches[0].sizes[0]):
        _multiply(call, first, second, call.result())


def _multiply_by_vector(call: KernelCall, *, first: int) -> None:
    """Copy matrices without compact rows or columns, and vectors with stride 0, as `addmv_out_cuda()` does."""
    call.allocate_results()
    matrix, vector = call.tensor(first), call.tensor(first + 1)
    if call.result().numel > 0 and matrix.numel > 0:
        call.copy_unless(vector.strides[0] != 0, vector)
        call.copy_unless(_has_columns(matrix) or _has_rows(matrix), matrix)
        call_blas(call)


rule("mv")(partial(_multiply_by_vector, first=0))
rule("addmv", "addmv_", "addmv.out")(partial(_multiply_by_vector, first=1))


@rule("dot", "vdot")
def _dot(call: KernelCall) -> None:
    call.allocate_results()
    call_blas(call)


# ---- The sizes and lifetimes of the workspaces of cuBLAS and cuBLASLt


CUBLAS, CUBLASLT = 0, 1  # WorkspaceNumber in csrc/extensions/memory/device_memory.h
MAX_INT32 = 2**31 - 1


def call_blas(call: KernelCall, *, is_lt: bool = False) -> None:
    """Add one call of cuBLAS, or of cuBLASLt."""
    major = call.gpu.major
    nbytes = cublaslt_bytes(major) if is_lt else cublas_bytes(major)
    if not _keeps_workspaces():
        call.allocate_and_free(nbytes)
        return
    # `getCurrentCUDABlasLtHandle()` returns the cuBLAS handle, so the cuBLAS workspace is allocated.
    is_shared = is_lt and _shares_workspaces()
    call.keep_workspace(CUBLAS, max(nbytes, cublas_bytes(major)) if is_shared else cublas_bytes(major))
    if is_lt and not is_shared:
        call.keep_workspace(CUBLASLT, nbytes)


def cublas_bytes(major: int) -> int:
    """Return the size of a cuBLAS workspace on a GPU with this compute capability."""
    chosen = _cublas_bytes_of_environment()
    if chosen is not None:
        return chosen
    last_large = 12 if DIFFERENCES["workspaces_of_blackwell"].applies else 9
    return (4096 * 8 if 9 <= major <= last_large else 4096 * 2 + 16 * 8) << 10  # :4096:8 or :4096:2:16:8


def cublaslt_bytes(major: int) -> int:
    """Return the size of a cuBLASLt workspace on a GPU with this compute capability."""
    chosen = _cublaslt_bytes_of_environment()
    return min(chosen, cublas_bytes(major)) if _shares_workspaces() else chosen


@cache
def _keeps_workspaces() -> bool:
    """Return true if the first call of a thread on a stream allocates a workspace that is kept.

    Follows `isCUDABlasWorkspaceCachingEnabled()` in CublasHandlePool.cpp.
    """
    return not DIFFERENCES["freed_workspaces"].applies or _flag("TORCH_CUBLAS_WORKSPACE_CACHE") is True


@cache
def _shares_workspaces() -> bool:
    """Return true if a kept workspace serves both libraries: `unified_cublas_and_lt_workspaces()`."""
    chosen = _flag("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    return _keeps_workspaces() and (DIFFERENCES["shared_workspaces"].applies if chosen is None else chosen)


def _flag(name: str) -> bool | None:
    """Follow `c10::utils::check_env()`, which ignores other values than 0 and 1."""
    value = os.environ.get(name)
    if value not in ("0", "1", None):
        warn(f"Ignoring invalid value for boolean flag {name}: {value}valid values are 0 or 1.", stacklevel=2)
    return {"0": False, "1": True}.get(value or "")


@cache
def _cublas_bytes_of_environment() -> int | None:
    """Follow `parseChosenWorkspaceSize()`: return the sum of all `:KIB:COUNT` in the variable."""
    parts = re.findall(r":([0-9]+):([0-9]+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum((int(kib) << 10) * int(count) for kib, count in parts) if parts else None


@cache
def _cublaslt_bytes_of_environment() -> int:
    """Follow `parseCUDABlasLtWorkspaceSize()`: the variable is in KiB, and ignored unless it begins with an `int`."""
    number = re.match(r"\s*([+-]?[0-9]+)", os.environ.get("CUBLASLT_WORKSPACE_SIZE", ""))
    kib = int(number[1]) if number else 1024
    return (kib if -MAX_INT32 <= kib <= MAX_INT32 else 1024) << 10


# ---- Scaled dot product attention: transformers/cuda in ATen/native
#
# The flash attention kernels are those for sm80 and later, the memory-efficient attention kernels the largest for sm80
# in kernel_forward.h and kernel_backward.h.


FLOAT = 4  # bytes


def _rounded_up(size: int, block: int) -> int:
    return divide_up(size, block) * block


class _Sizes:
    """The sizes of an attention whose tensors are [batch, head, position, feature]."""

    def __init__(self, query: Geometry, key: Geometry) -> None:
        self.batch, self.heads, self.queries, self.features = query.sizes
        self.key_heads, self.keys = key.sizes[1], key.sizes[2]
        self.rows = self.batch * self.heads * self.queries
        # Flash attention rounds the number of features.
        self.rounded_features = _rounded_up(self.features, 32 if self.features <= 128 else 64)


def _as_float(number: float) -> float:
    """Round to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def _count_splits(sizes: _Sizes, gpu: Gpu) -> int:
    """Follow `num_splits_heuristic()` in flash_api.cpp: the number of parts of the keys that keeps the device busy."""
    keys_of_block = 256 if sizes.features <= 64 else 128 if sizes.features <= 128 else 64
    num_blocks = sizes.batch * sizes.heads * divide_up(sizes.queries, 64)
    key_blocks = divide_up(sizes.keys, keys_of_block)
    processors = gpu.multiprocessors * 2
    if num_blocks >= _as_float(_as_float(0.8) * processors):
        return 1

    def efficiency(splits: int) -> float:
        waves = _as_float(num_blocks * splits / processors)
        return _as_float(waves / max(math.ceil(waves), 1))

    eligible = [
        splits
        for splits in range(1, min(128, processors, key_blocks) + 1)
        if splits == 1 or divide_up(key_blocks, splits) != divide_up(key_blocks, splits - 1)
    ]
    best = max(map(efficiency, eligible), default=0.0)
    enough = _as_float(_as_float(0.85) * best)
    return next((splits for splits in eligible if efficiency(splits) >= enough), 1)


@rule("_scaled_dot_product_flash_attention")
def _flash_attention(call: KernelCall) -> None:
    # The results are the output, the log-sum-exp, lengths that are not allocated, and the state of the generator.
    seed, offset = 6, 7
    sizes = _Sizes(call.tensor(0), call.tensor(1))
    call.allocate_results(0, 1)
    if call.arguments[3] > 0:
        call.allocate(2 * 8)  # the state
        call.allocate_results(offset, seed)
        return
    if sizes.queries == 1 and sizes.heads > sizes.key_heads:
        # The queries of a group of heads are processed as queries of one head.
        sizes.queries, sizes.heads = sizes.heads // sizes.key_heads, sizes.key_heads
    splits = _count_splits(sizes, call.gpu)
    parts = 0 if splits == 1 else splits * sizes.rows * FLOAT
    sums = call.allocate(parts)
    outputs = call.allocate(parts * sizes.rounded_features)
    call.allocate_results(seed, offset)
    call.free(sums, outputs)


def _copy_for_kernel(call: KernelCall, tensor: Geometry) -> None:
    """Copy a tensor unless it is contiguous as [batch, position, head, feature]."""
    call.copy_unless(tensor.transpose(1, 2).is_contiguous(), tensor)


@rule("_scaled_dot_product_flash_attention_backward")
def _flash_attention_backward(call: KernelCall) -> None:
    sizes = _Sizes(call.tensor(1), call.tensor(2))
    _copy_for_kernel(call, call.tensor(0))
    _copy_for_kernel(call, call.tensor(4))
    call.allocate_results()
    rows = sizes.batch * sizes.heads * _rounded_up(sizes.queries, 128)
    call.allocate(rows * FLOAT)  # of the softmax
    call.allocate(rows * sizes.rounded_features * FLOAT)  # the gradient of the queries
    if sizes.heads != sizes.key_heads:  # the gradients of keys and values, expanded to all heads
        for _ in range(2):
            call.allocate(sizes.batch * sizes.keys * sizes.heads * sizes.features * call.tensor(2).element)


@rule("_scaled_dot_product_efficient_attention")
def _efficient_attention(call: KernelCall) -> None:
    call.allocate_results(2, 3)
    call.allocate_results()
    value = call.tensor(2)
    if value.dtype is not torch.float32 and value.sizes[3] > 128:  # the columns of a block
        call.allocate(_Sizes(call.tensor(0), call.tensor(1)).rows * value.sizes[3] * FLOAT)  # the output


def _efficient_workspace(sizes: _Sizes, value_features: int, dtype: torch.dtype) -> int:
    """Follow `workspace_size()` in kernel_backward.h, with the blocks of the `AttentionBackwardKernel` for sm80."""
    features = max(sizes.features, value_features)
    is_float = dtype is torch.float32
    query_block, key_block = 64 if features <= 64 else 128, 64
    column_block = 64 if is_float or features <= 64 or features > 128 else 128  # of the gradient of the queries
    counters = 16  # bytes for each block
    blocks = divide_up(sizes.queries, query_block) * divide_up(sizes.features, column_block)
    nbytes = blocks * (query_block * column_block * FLOAT + counters)
    if not is_float and features > 128:  # accumulates outside of registers
        rounded = _rounded_up(sizes.features, query_block) + _rounded_up(value_features, query_block)
        nbytes += _rounded_up(sizes.keys, key_block) * FLOAT * rounded
    return sizes.batch * sizes.heads * nbytes


@rule("_scaled_dot_product_efficient_attention_backward")
def _efficient_attention_backward(call: KernelCall) -> None:
    query, key, value, output = call.tensor(1), call.tensor(2), call.tensor(3), call.tensor(5)
    sizes = _Sizes(query, key)
    _copy_for_kernel(call, call.tensor(0))
    call.allocate_results(0, 1, 2)
    if sizes.heads != sizes.key_heads:  # `_efficient_attention_backward()` sums the gradients of each head
        for tensor in (key, value):
            call.allocate(tensor.nbytes * (sizes.heads // sizes.key_heads))
    call.allocate_results()  # the gradient of a mask
    if query.dtype is torch.float32:
        product = call.copy(output)
        delta = call.allocate(sizes.rows * FLOAT)
        if sizes.heads > 1 and sizes.queries > 1:  # [batch, position, head] becomes [batch, head, position]
            transposed = call.allocate(sizes.rows * FLOAT)
            call.free(delta)
            delta = transposed
        call.free(product)
    else:  # the kernel computes delta itself
        delta = call.allocate(sizes.rows * FLOAT)
    buffer = call.allocate(_efficient_workspace(sizes, value.sizes[3], query.dtype))
    call.free(delta, buffer)
