"""Matrix products: Blas.cpp in ATen/native/cuda."""

from __future__ import annotations

import os
import re
from functools import cache, partial
from warnings import warn

import torch

from ....internals.torch_release import DIFFERENCES
from .calls import KernelCall, rule
from .geometry import Geometry, is_reduced

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
