"""Triton on threads with fake devices: its driver, and launches of kernels.

A launch would compile the kernel, query the driver for the device, and pass addresses. Only the effects that a caller
can observe remain: arguments are bound, the grid is computed, CPU tensors are rejected, known values of the arguments
are dropped, and autotuning allocates its buffer. The caller owns everything that a kernel writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Any

import torch

from ... import _C
from ...internals.leases import while_fakes_live
from ...internals.patching import Function, once
from .devices import while_devices_exist

__all__ = ["launch_observers", "note_launch", "skip_triton_launches"]

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
