"""Replacements of CUDA libraries and of Triton on threads with fake devices.

Programs query versions, mark ranges for a profiler, and copy storages without an operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from ctypes import string_at
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.nvtx

from ... import _C
from ...internals.leases import while_fakes_live
from ...internals.patching import Function, once
from ..addresses import MOST_BYTES, storage_from
from .devices import answers, index_of, while_devices_exist

__all__ = [
    "LIBRARIES",
    "NO_KERNELS",
    "NO_POOLS",
    "cudart",
    "launch_observers",
    "note_launch",
    "refusing_call",
    "settings",
    "skip_triton_launches",
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


# ---- Triton on threads with fake devices: its driver, and launches of kernels
#
# A launch would compile the kernel, query the driver for the device, and pass addresses. Only the effects that a caller
# can observe remain: arguments are bound, the grid is computed, CPU tensors are rejected, known values of the arguments
# are dropped, and autotuning allocates its buffer. The caller owns everything that a kernel writes.


# Size of the buffer that `triton.testing.do_bench()` allocates to flush the device's cache between runs.
BYTES_OF_BENCHMARK = 256 * 2**20

WORKSPACE = 4  # `MemoryCategory::kWorkspace` (csrc/extensions/memory/timeline.h)

# Called with the name of each kernel that would have run.
launch_observers: list[Callable[[str], object]] = []


@once
def skip_triton_launches() -> None:
    """Skip launches with fakes from the first block of `fake_mode` on. Before, launches make deferred tensors real."""
    reason = "compiles a kernel and gives it addresses"
    while_fakes_live.replaces("triton.runtime.jit:JITFunction", "run", reason=reason)(_launch)
    while_fakes_live.replaces("triton.runtime.autotuner:Autotuner", "run", reason=reason)(_tune)


def _launch(original: Function, self: Any, /, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    tensors = list(_tensors_in((*args, *kwargs.values())))
    if warmup or not any(map(_C.is_fake, tensors)):
        return original(self, *args, grid=grid, warmup=warmup, **kwargs)
    for hook in getattr(self, "pre_run_hooks", ()):
        hook(*args, **kwargs)
    bound = self.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in self.signature.parameters})
    bound.apply_defaults()
    if callable(grid):
        grid(dict(bound.arguments))
    _check_devices(bound.arguments.values())
    note_launch(tensors)
    for observe in launch_observers:
        observe(str(self.__name__))
    return None


def note_launch(tensors: list[torch.Tensor]) -> None:
    """Note that a kernel may have written these tensors."""
    _C.note_foreign_write(tensors)
    for index in {tensor.device.index for tensor in tensors if tensor.is_cuda}:
        _C.count_work_on_fake_stream(index)


def _check_devices(arguments: Iterable[Any]) -> None:
    """Raise for CPU tensors, like the launcher when it queries the driver for each pointer."""
    for i, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor) and argument.device.type == "cpu" and argument.numel():
            if argument.is_pinned():
                continue
            raise ValueError(f"Pointer argument (at {i}) cannot be accessed from Triton (cpu tensor?)")


def _tune(original: Function, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Use the first configuration: without timing, the fastest is unknown."""
    if not any(map(_C.is_fake, _tensors_in((*args, *kwargs.values())))):
        return original(self, *args, **kwargs)
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    named = {**self.nargs, **kwargs}
    config = self.best_config = _config_for(self, named)
    if config.pre_hook is not None:
        config.pre_hook({**named, **config.all_kwargs()})
    result = self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None
    return result


def _config_for(tuner: Any, arguments: dict[str, Any]) -> Any:
    """Return the cached configuration, or the first one, which is cached then as after a measurement."""
    if len(tuner.configs) == 1:
        return tuner.configs[0]
    dtypes = [str(arguments[n].dtype) for n in tuner.arg_names if hasattr(arguments.get(n), "dtype")]
    key = (*(arguments[name] for name in tuner.keys if name in arguments), *dtypes)
    if key not in tuner.cache:
        buffer = torch.empty(BYTES_OF_BENCHMARK, dtype=torch.int8, device="cuda")
        if _C.memory_number(buffer) >= 0:  # it is tracked
            _C.mark_memory([buffer], WORKSPACE)
        tuner.cache[key] = tuner.configs[0]
    return tuner.cache[key]


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a kernel, including those in tuples, descriptors and wrappers."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)
        elif isinstance(base := getattr(value, "base", None), torch.Tensor):
            yield base


# ---- The driver, which libraries and the compiler query for the kind of GPU, to select configurations


@while_devices_exist.replaces("triton.runtime.driver:DriverConfig", "active", reason="loads the driver of real GPUs")
def _active(original: Function, self: Any) -> Any:
    return _Driver() if _C.fake_cuda_devices() else original(self)


class _Driver:
    """The interface of `triton.backends.driver.DriverBase`, for fake CUDA devices."""

    def __init__(self) -> None:
        self.utils = _Utilities()
        self.get_device_capability = torch.cuda.get_device_capability

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_device(self) -> int:
        return torch.cuda.current_device()

    def set_current_device(self, device: int) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: int | None = None) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def get_current_target(self) -> Any:
        major, minor = torch.cuda.get_device_capability()
        return import_module("triton.backends.compiler").GPUTarget("cuda", 10 * major + minor, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        return import_module("triton.testing").do_bench

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(64 * 2**20, dtype=torch.int, device="cuda")

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()


class _Utilities:
    def get_device_properties(self, device: int) -> dict[str, int]:
        properties: Any = torch.cuda.get_device_properties(device)
        return {
            "max_shared_mem": properties.shared_memory_per_block_optin,
            "max_num_regs": 65536,
            "multiprocessor_count": properties.multi_processor_count,
            "warpSize": properties.warp_size,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }
