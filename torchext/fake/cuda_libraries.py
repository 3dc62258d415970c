"""Replacements of CUDA libraries on threads with fake devices.

Programs query versions, mark ranges for a profiler, and copy storages without an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
import torch.cuda.nvtx

from .. import _C
from ..tools.leases import Lease
from .cuda_devices import index_of

__all__ = ["NO_POOLS", "patch_libraries", "refusing"]

# Result of NVML measurements: nothing runs on a fake device.
IDLE = 0

# From a recent CUDA build. A build with NCCL returns its own version.
NCCL_VERSION = (2, 27, 5)

# `cudaSuccess`
SUCCESS = 0

_sync_debug_mode = 0


def _set_sync_debug_mode(debug_mode: int | str) -> None:
    global _sync_debug_mode
    names = {"default": 0, "warn": 1, "error": 2}
    if isinstance(debug_mode, str) and debug_mode not in names:
        raise RuntimeError("invalid value of debug_mode, expected one of `default`, `warn`, `error`")
    _sync_debug_mode = names[debug_mode] if isinstance(debug_mode, str) else debug_mode


def _check_error(result: int) -> None:
    if result != SUCCESS:
        raise torch.cuda.CudaError(result)


def _succeed(*args: Any) -> int:
    return SUCCESS


def _cudart() -> SimpleNamespace:
    """Return the functions of the CUDA runtime that PyTorch binds."""
    return SimpleNamespace(
        cudaError=SimpleNamespace(success=SUCCESS),
        cudaGetErrorString=lambda result: f"error {result} of a fake CUDA device",
        cudaHostRegister=_succeed,
        cudaHostUnregister=_succeed,
        cudaMemGetInfo=lambda device: torch.cuda.mem_get_info(device),
        cudaProfilerStart=_succeed,
        cudaProfilerStop=_succeed,
        cudaStreamCreate=_succeed,
        cudaStreamDestroy=_succeed,
    )


def _handle(device: Any = None) -> int:
    """Return a value for the address of a library's handle: distinct for each device, and not null."""
    return index_of(device) + 1


def _idle(device: Any = None) -> int:
    index_of(device)
    return IDLE


def _workspace_size_function(get: Callable[[], int], variable: str) -> Callable[..., int]:
    """Replace the getter and setter of a workspace size, which is cached with operator results and cannot change."""

    def workspace_size(size: int | None = None) -> int:
        if size is not None and size != get():
            raise RuntimeError(
                "The workspace size of cuBLAS cannot be set on fake CUDA devices. Set the environment variable "
                f"{variable} before the process starts."
            )
        return get()

    return workspace_size


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


ANSWERS: list[tuple[ModuleType, dict[str, Callable[..., Any]]]] = [
    (
        torch.cuda,
        {
            "can_device_access_peer": lambda device, peer_device: index_of(device) != index_of(peer_device),
            "check_error": _check_error,
            "clock_rate": _idle,
            "cudart": _cudart,
            "current_blas_handle": _handle,
            "current_solver_handle": _handle,
            "get_sync_debug_mode": lambda: _sync_debug_mode,
            "ipc_collect": _do_nothing,
            "memory_usage": _idle,
            "power_draw": _idle,
            "set_sync_debug_mode": _set_sync_debug_mode,
            "temperature": _idle,
            "utilization": _idle,
        },
    ),
    (
        torch.backends.cuda,
        {
            "cublas_workspace_size": _workspace_size_function(_C.cublas_workspace_size, "CUBLAS_WORKSPACE_CONFIG"),
            "cublaslt_workspace_size": _workspace_size_function(_C.cublaslt_workspace_size, "CUBLASLT_WORKSPACE_SIZE"),
        },
    ),
    # NVTX returns the depth of nested ranges, which is not tracked.
    (
        torch.cuda.nvtx,
        {
            "mark": _do_nothing,
            "range_end": _do_nothing,
            "range_pop": lambda: 0,
            "range_push": lambda msg: 0,
            "range_start": lambda msg: 0,
        },
    ),
]


NO_POOLS = (
    "Fake CUDA devices simulate only PyTorch's caching allocator: they do not support another allocator, or a "
    "memory pool in a CUDA build of PyTorch. Run the program without it."
)
REFUSED: list[tuple[Any, str, str]] = [
    (torch.cuda.memory.CUDAPluggableAllocator, "__init__", NO_POOLS),
    (torch.cuda.memory, "change_current_allocator", NO_POOLS),
]


def refusing(message: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a patch that raises an error with `message` on threads with fake devices."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            if _C.fake_cuda_devices():
                raise RuntimeError(message)
            return original(*args, **kwargs)

        return refuse

    return make


def _moving(original: Callable[..., torch.UntypedStorage]) -> Callable[..., torch.UntypedStorage]:
    """Replace `UntypedStorage.to()`: `torch.load(map_location="cuda")` copies storages without an operator."""

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        wanted = torch.device(device)
        if not _C.fake_cuda_devices() or wanted == self.device or wanted.type not in ("cpu", "cuda"):
            return original(self, device=device, non_blocking=non_blocking)
        if _C.is_storage_of_fakes(self):
            return _C.bytes_of_storage(self).to(wanted).untyped_storage()
        if wanted.type == "cpu":
            return original(self, device=device, non_blocking=non_blocking)
        return torch.empty(self.nbytes(), dtype=torch.uint8, device=wanted).untyped_storage()

    return to


def patch_libraries(lease: Lease, answering: Callable[..., Any]) -> None:
    """Declare the replaced functions.

    Args:
        lease: Held while any thread has fake devices.
        answering: Given an original and `answer`, returns a function that calls `answer` on threads with fake devices.
    """
    reason = "calls a CUDA library that is not loaded"
    for module, answers in ANSWERS:
        for name, answer in answers.items():
            if hasattr(module, name):  # newer releases have more handles and measurements
                lease.patch(module, name, partial(answering, answer=answer), reason)
    if not hasattr(torch._C, "_nccl_version"):
        lease.patch(torch.cuda.nccl, "version", partial(answering, answer=lambda: NCCL_VERSION), reason)
    for owner, name, message in REFUSED:
        lease.patch(owner, name, refusing(message), reason)
    lease.patch(torch.UntypedStorage, "to", _moving, "copies memory without calling an operator")
