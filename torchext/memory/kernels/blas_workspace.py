"""The sizes and lifetimes of the workspaces of cuBLAS and cuBLASLt."""

from __future__ import annotations

import os
import re
from functools import cache
from warnings import warn

from ...tools.torch_release import DIFFERENCES
from .calls import KernelCall

__all__ = ["call_blas", "cublas_bytes", "cublaslt_bytes"]

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
