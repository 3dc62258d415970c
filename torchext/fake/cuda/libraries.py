"""Replacements of CUDA libraries on threads with fake devices.

Programs query versions, mark ranges for a profiler, and copy storages without an operator.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import string_at
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.nvtx

from ... import _C
from ...internals.patching import Function
from ..addresses import MOST_BYTES, storage_from
from .devices import answers, index_of, while_devices_exist

__all__ = [
    "LIBRARIES",
    "NO_KERNELS",
    "NO_POOLS",
    "cudart",
    "refusing_call",
    "settings",
]

# Result of NVML measurements: nothing runs on a fake device.
IDLE = 0

# `cudaSuccess`
SUCCESS = 0


def _check_error(result: int) -> None:
    if result != SUCCESS:
        raise torch.cuda.CudaError(result)


def _succeed(*args: Any) -> int:
    return SUCCESS


def cudart() -> SimpleNamespace:
    """Return the functions of the CUDA runtime that PyTorch binds."""
    return SimpleNamespace(
        cudaError=SimpleNamespace(success=SUCCESS),
        cudaGetErrorString=lambda result: f"error {result} of a fake CUDA device",
        cudaHostRegister=_succeed,
        cudaHostUnregister=_succeed,
        cudaMemGetInfo=lambda device: _C.cuda_mem_get_info(index_of(device)),
        cudaProfilerStart=_succeed,
        cudaProfilerStop=_succeed,
        cudaStreamCreate=_succeed,
        cudaStreamDestroy=_succeed,
    )


def _handle() -> int:
    """Return a value for the address of a library's handle: distinct for each device, and not null."""
    return torch.cuda.current_device() + 1


def _idle(device: Any = None) -> int:
    index_of(device)
    return IDLE


def _device_memory_used(device: Any = None) -> int:
    free, total = _C.cuda_mem_get_info(index_of(device))
    return total - free


def _cublas_workspace_size() -> int:
    from .kernels.blas import cublas_bytes

    return cublas_bytes(_major())


def _cublaslt_workspace_size() -> int:
    from .kernels.blas import cublaslt_bytes

    return cublaslt_bytes(_major())


def _major() -> int:
    return _C.fake_gpu()[4]


def _unless_equal(get: Callable[[], int], variable: str) -> Callable[[int], None]:
    """Replace the setter of a workspace size, which is cached with operator results and cannot change."""

    def set_size(size: int) -> None:
        if size != get():
            raise RuntimeError(
                "The workspace size of cuBLAS cannot be set on fake CUDA devices. Set the environment variable "
                f"{variable} before the process starts."
            )

    return set_size


def _set_most_plans(index: int, size: int) -> None:
    if size < 0:
        raise RuntimeError(f"cuFFT plan cache size must be non-negative, but got {size}")
    settings["plans", index] = size


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def refusing_call(message: str) -> Callable[..., Any]:
    """Return a function that raises an error with `message`."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(message)

    return refuse


# The settings that the program has changed.
settings: dict[object, Any] = {}

MOST_PLANS = 4096  # `CUFFT_DEFAULT_CACHE_SIZE`
NO_PLANS = "The number of cached cuFFT plans is unknown on fake CUDA devices, which run no transform."

ANSWERS: list[tuple[ModuleType, dict[str, Callable[..., Any]]]] = [
    (
        torch.cuda,
        {
            "check_error": _check_error,
            "clock_rate": _idle,
            "cudart": cudart,
            "device_memory_used": _device_memory_used,
            "memory_usage": _idle,
            "power_draw": _idle,
            "temperature": _idle,
            "utilization": _idle,
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
    (
        torch,
        {
            "_cufft_clear_plan_cache": _do_nothing,
            "_cufft_get_plan_cache_max_size": lambda index: settings.get(("plans", index), MOST_PLANS),
            "_cufft_get_plan_cache_size": refusing_call(NO_PLANS),
            "_cufft_set_plan_cache_max_size": _set_most_plans,
        },
    ),
]

LIBRARIES: dict[str, Callable[..., Any]] = {
    "_cuda_clearCublasWorkspaces": _C.forget_workspaces,
    "_cuda_getCublasLtWorkspaceSize": _cublaslt_workspace_size,
    "_cuda_getCublasWorkspaceSize": _cublas_workspace_size,
    "_cuda_getCurrentBlasHandle": _handle,
    "_cuda_getCurrentSolverHandle": _handle,
    "_cuda_ipc_collect": _do_nothing,
    "_cuda_resetCublasLtWorkspaceSize": _do_nothing,
    "_cuda_resetCublasWorkspaceSize": _do_nothing,
    "_cuda_setCublasLtWorkspaceSize": _unless_equal(_cublaslt_workspace_size, "CUBLASLT_WORKSPACE_SIZE"),
    "_cuda_setCublasWorkspaceSize": _unless_equal(_cublas_workspace_size, "CUBLAS_WORKSPACE_CONFIG"),
}

NO_POOLS = (
    "Fake CUDA devices simulate only PyTorch's caching allocator: they do not support another allocator, or a "
    "memory pool in a CUDA build of PyTorch. Run the program without it."
)
NO_KERNELS = "Fake CUDA devices run no kernels: this function would compile or start one. Run the program without it."
REFUSED: list[tuple[Any, str, str]] = [
    (torch.cuda.memory.CUDAPluggableAllocator, "__init__", NO_POOLS),
    (torch.cuda.memory, "change_current_allocator", NO_POOLS),
    (torch.cuda, "_compile_kernel", NO_KERNELS),
    (torch.cuda.Event, "from_ipc_handle", "Fake CUDA devices have no events of other processes."),
]


REASON = "calls a CUDA library that is not loaded"
for _module, _answers in ANSWERS:  # newer releases have more handles and measurements
    answers(_module, {name: answer for name, answer in _answers.items() if hasattr(_module, name)}, reason=REASON)
for _owner, _name, _message in REFUSED:
    answers(_owner, {_name: refusing_call(_message)}, reason=REASON)


@while_devices_exist.replaces(torch.UntypedStorage, "to", reason="copies memory without calling an operator")
def _to(original: Function, self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> Any:
    """`torch.load(map_location="cuda")` copies storages without an operator."""
    wanted = torch.device(device)
    if not _C.fake_cuda_devices() or wanted == self.device or wanted.type not in ("cpu", "cuda"):
        return original(self, device=device, non_blocking=non_blocking)
    if _C.is_storage_of_fakes(self):
        return _C.bytes_of_storage(self).to(wanted).untyped_storage()
    if wanted.type == "cpu":
        return original(self, device=device, non_blocking=non_blocking)
    is_small = 0 < self.nbytes() <= MOST_BYTES  # such as a step counter's
    known = (string_at(self.data_ptr(), self.nbytes()), None) if is_small else None
    return storage_from(self.nbytes(), str(wanted), known)
