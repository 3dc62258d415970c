"""Triton kernels that are launched with fakes: nothing runs, because the caller owns everything a kernel writes.

A launch would compile the kernel, query the driver for the device, and pass addresses. Only the effects that a caller
can observe remain: arguments are bound, the grid is computed, CPU tensors are rejected, known values of the arguments
are dropped, and autotuning allocates its buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C
from ..tools.imports import once_imported
from ..tools.leases import while_fakes_live

__all__ = ["launch_observers", "triton_launches_nothing"]

JIT = "triton.runtime.jit"
AUTOTUNER = "triton.runtime.autotuner"

# Size of the buffer that `triton.testing.do_bench()` allocates to flush the device's cache between runs.
BYTES_OF_BENCHMARK = 256 * 2**20

WORKSPACE = 4  # `MemoryCategory::kWorkspace` (csrc/extensions/memory/timeline.h)

# Called with the name of each kernel that would have run.
launch_observers: list[Callable[[str], object]] = []


@contextmanager
def triton_launches_nothing() -> Iterator[None]:
    """Skip launches with fakes. Triton may be imported before the block or in it."""
    _teach()
    with once_imported(JIT, _teach), once_imported(AUTOTUNER, _teach):
        yield


_patched: set[type] = set()


def _teach() -> None:
    makers = ((JIT, "JITFunction", _launching), (AUTOTUNER, "Autotuner", _tuning))
    for module, name, make in makers:
        owner = getattr(sys.modules.get(module), name, None)
        if owner is not None and owner not in _patched:
            _patched.add(owner)
            while_fakes_live.patch(owner, "run", make, "compiles a kernel and gives it addresses")


def _launching(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
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
        _C.note_foreign_write(tensors)
        for index in {tensor.device.index for tensor in tensors if tensor.is_cuda}:
            _C.count_work_on_fake_stream(index)
        for observe in launch_observers:
            observe(str(self.__name__))
        return None

    return run


def _check_devices(arguments: Iterable[Any]) -> None:
    """Raise for CPU tensors, like the launcher when it queries the driver for each pointer."""
    for i, argument in enumerate(arguments):
        if isinstance(argument, torch.Tensor) and argument.device.type == "cpu" and argument.numel():
            if argument.is_pinned():
                continue
            raise ValueError(f"Pointer argument (at {i}) cannot be accessed from Triton (cpu tensor?)")


def _tuning(original: Callable[..., Any]) -> Callable[..., Any]:
    """Use the first configuration: without timing, the fastest is unknown."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
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

    return run


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
