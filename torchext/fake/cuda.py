"""The functions of `torch.cuda` on a machine without CUDA devices, while a thread is in a `fake_mode(fake_cuda=...)`.

The other half of NOTE [CUDA without CUDA], csrc/fake/cuda/fake_cuda.h. The functions are replaced while any thread is
in such a block, and answer for the fake devices on those threads only.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.accelerator._utils import _get_device_index

from .. import _C
from ..tools.leases import Lease, while_fakes_live
from ..tools.once import once
from .cuda_libraries import patch_libraries
from .cuda_parallel import patch_comm
from .cuda_streams import (
    FakeEvent,
    FakeStream,
    current_stream,
    default_stream,
    set_stream,
    set_stream_by_id,
    synchronize,
)
from .gpus import FakeGPU

__all__ = ["fake_cuda"]

MAX_DEVICES = 64  # of `c10::DeviceIndex` PyTorch itself uses no more (C10_COMPILE_TIME_MAX_GPUS)

# What the devices of `fake_cuda=True` are like: the last generation of which every PyTorch release here has kernels.
DEFAULT = FakeGPU("torchext fake CUDA device", memory=80 * 2**30)


@contextmanager
def fake_cuda(devices: bool | int | FakeGPU) -> Iterator[None]:
    """Lets this thread see CUDA devices in the block; does nothing where there are real ones.

    Args:
        devices: Their number, or what they are like; True is one.

    Raises:
        ValueError: There cannot be so many.
    """
    gpu = devices if isinstance(devices, FakeGPU) else None
    count = gpu.count if gpu is not None else int(devices)  # type: ignore[arg-type]
    if not 0 <= count <= MAX_DEVICES:
        raise ValueError(
            f"`fake_cuda` is True, False, a number of devices up to {MAX_DEVICES} or a FakeGPU, but it is {devices!r}."
        )
    with _block(count, gpu):
        yield


@contextmanager
def _block(count: int, gpu: FakeGPU | None) -> Iterator[None]:
    """The same, for checked arguments. Without `gpu` the devices are like those around the block, if there are any."""
    block = _C.enter_fake_cuda(count) if count else None
    if block is None:
        yield
        return
    if gpu is not None:
        _describe(gpu)
    _replace_backward()
    try:
        with _while_devices_exist.hold():
            # Remembers what the accelerator is (`functools.cache`).
            torch.get_device_module.cache_clear()
            try:
                yield
            finally:
                torch.get_device_module.cache_clear()
    finally:
        _C.leave_fake_cuda(block)  # last: raises on another thread


def _describe(gpu: FakeGPU) -> None:
    _C.describe_fake_gpu(
        gpu.name,
        gpu.memory,
        gpu.context,
        gpu.capability,
        gpu.multiprocessors,
        gpu.max_threads_per_multiprocessor,
        gpu.shared_memory_per_block_optin,
        gpu.l2_cache,
    )


def _index(device: Any = None) -> int:
    """The index of `device`, as the functions of torch.cuda take it, checked."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    count = _C.fake_cuda_devices()
    if not 0 <= index < count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: device {index} is named, but fake_mode(fake_cuda={count}) has the "
            f"devices cuda:0 to cuda:{count - 1}."
        )
    return index


def _set_device(device: Any) -> None:
    if torch.cuda._utils._get_device_index(device, optional=True) >= 0:  # a negative one is ignored, as by the original
        torch._C._accelerator_setDeviceIndex(_index(device))


def _exchange_device(device: int) -> int:
    previous = torch._C._accelerator_getDeviceIndex()
    if device >= 0:
        torch._C._accelerator_exchangeDevice(_index(device))
    return previous


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    index = _index(device)
    name, memory, (major, minor), multiprocessors, threads, shared_memory, l2_cache = _C.fake_gpu()
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        total_memory=memory,
        multi_processor_count=multiprocessors,
        max_threads_per_multi_processor=threads,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared_memory,
        shared_memory_per_multiprocessor=shared_memory + 1024,
        L2_cache_size=l2_cache,
        max_threads_per_block=1024,
        warp_size=32,
        is_integrated=False,
        is_multi_gpu_board=False,
        gcnArchName="",
        uuid=uuid.UUID(int=index),
        pci_bus_id=index,
        pci_device_id=0,
        pci_domain_id=0,
        clock_rate=0,
        memory_clock_rate=0,
        memory_bus_width=0,
    )


def _get_device_name(device: Any = None) -> str:
    return str(_get_device_properties(device).name)


def _get_device_capability(device: Any = None) -> tuple[int, int]:
    properties = _get_device_properties(device)
    return properties.major, properties.minor


def _snapshot(device: Any = None, augment_with_fx_traces: bool = False) -> dict[str, Any]:
    return {
        "segments": _C.cuda_memory_segments(),
        "device_traces": _C.cuda_memory_traces(),
        "allocator_settings": {},
        "external_annotations": [],
    }


# `HistoryStacks` (csrc/memory/device_memory.h) by `context`
STACKS = {None: 0, "state": 1, "alloc": 1, "all": 2}


def _record_memory_history(enabled: str | bool | None = "all", *args: Any, **kwargs: Any) -> None:
    record = _record_history_as_before if isinstance(enabled, bool) else _record_history
    record(enabled, *args, **kwargs)


def _record_history(
    enabled: Any,
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    *args: Any,
    **kwargs: Any,
) -> None:
    if enabled not in (None, "state", "all"):
        raise RuntimeError("expected enabled to be 'state', or 'all'")
    if context not in STACKS:
        raise RuntimeError("expected context to be 'state', 'alloc', or 'all'")
    _C.cuda_record_memory_history(enabled is not None, 1 if enabled == "state" else max_entries, STACKS[context])


def _record_history_as_before(
    enabled: Any, record_context: bool = True, trace_alloc_max_entries: int = 1, *args: Any, **kwargs: Any
) -> None:
    """Takes the arguments that PyTorch calls legacy."""
    _C.cuda_record_memory_history(enabled, trace_alloc_max_entries, int(record_context))


def _set_memory_fraction(fraction: float, device: Any = None) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _C.cuda_set_memory_fraction(fraction, _index(device))


def _device_memory_used(device: Any = None) -> int:
    free, total = _C.cuda_mem_get_info(_index(device))
    return total - free


def _memory_fraction(device: Any = None) -> float:
    return _C.cuda_memory_fraction(_index(device))


def _is_capturing() -> bool:
    """Answers yes to `SyncBatchNorm`, which otherwise looks which processes had no input: all had some."""
    # Between it and this function are the replaced one and what stands for it.
    return sys._getframe(3).f_code is torch.nn.modules._functions.SyncBatchNorm.forward.__code__


def _synchronize(device: Any = None) -> None:
    synchronize(_index(device))


def _generator(device: Any = "cuda") -> torch.Generator:
    return _C.default_fake_cuda_generator(_index(device))


def _generators() -> list[torch.Generator]:
    return [_generator(i) for i in range(_C.fake_cuda_devices())]


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    if _C.is_fake(new_state):
        raise RuntimeError(
            "The state of a generator is read, but this one is a fake tensor. Make it outside of fake_mode()."
        )
    _generator(device).set_state(new_state)


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for i, state in enumerate(new_states):
        _set_rng_state(state, i)


def _manual_seed_all(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(int(seed))


def _seed_all() -> None:
    seed = None
    for generator in _generators():
        seed = generator.seed() if seed is None else generator.manual_seed(seed).initial_seed()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


ANSWERS: dict[str, Callable[..., Any]] = {
    "_exchange_device": _exchange_device,
    "_lazy_init": _do_nothing,
    "_maybe_exchange_device": _exchange_device,
    "current_device": lambda: torch._C._accelerator_getDeviceIndex(),
    "device_count": lambda: _C.fake_cuda_devices(),
    "get_device_capability": _get_device_capability,
    "get_device_name": _get_device_name,
    "get_device_properties": _get_device_properties,
    "_get_generator": _generator,
    "_set_stream_by_id": lambda stream_id, device_index, device_type: set_stream_by_id(stream_id, device_index),
    "current_stream": current_stream,
    "default_stream": default_stream,
    "get_rng_state": lambda device="cuda": _generator(device).get_state(),
    "get_rng_state_all": lambda: [generator.get_state() for generator in _generators()],
    "init": _do_nothing,
    "initial_seed": lambda: _generator().initial_seed(),
    "manual_seed": lambda seed: _generator().manual_seed(int(seed)) and None,
    "manual_seed_all": _manual_seed_all,
    "seed": lambda: _generator().seed() and None,
    "seed_all": _seed_all,
    "is_available": lambda: True,
    "is_current_stream_capturing": _is_capturing,
    "is_bf16_supported": lambda including_emulation=True: True,
    "_record_memory_history": _record_memory_history,
    "_snapshot": _snapshot,
    "empty_cache": lambda: _C.cuda_empty_cache(),
    "device_memory_used": _device_memory_used,
    "get_allocator_backend": lambda: "native",
    "get_per_process_memory_fraction": _memory_fraction,
    "mem_get_info": lambda device=None: _C.cuda_mem_get_info(_index(device)),
    "memory_snapshot": lambda mempool_id=None, include_traces=True: _C.cuda_memory_segments(),
    "memory_stats_as_nested_dict": lambda device=None: _C.cuda_memory_stats(_index(device)),
    "reset_accumulated_memory_stats": lambda device=None: _C.cuda_reset_accumulated_memory_stats(_index(device)),
    "reset_peak_memory_stats": lambda device=None: _C.cuda_reset_peak_memory_stats(_index(device)),
    "set_per_process_memory_fraction": _set_memory_fraction,
    "set_device": _set_device,
    "set_rng_state": _set_rng_state,
    "set_rng_state_all": _set_rng_state_all,
    "synchronize": _synchronize,
}


def _accelerator_stream(device: Any = None, /) -> Any:
    return current_stream(_get_device_index(device, optional=True))


def _set_accelerator_stream(stream: Any) -> None:
    set_stream(stream)


# `torch.accelerator` must not have the same functions as `torch.cuda`: Dynamo asserts that each has one name.
ACCELERATOR: dict[str, Callable[..., Any]] = {
    "current_stream": _accelerator_stream,
    "set_stream": _set_accelerator_stream,
}


def _accelerator_index(device: Any = None) -> int:
    return _index(_get_device_index(device, optional=True))


def _accelerator_memory_stats(device: Any = None, /) -> dict[str, Any]:
    return torch.cuda.memory.memory_stats(_accelerator_index(device))


ACCELERATOR_MEMORY: dict[str, Callable[..., Any]] = {
    "empty_cache": lambda: _C.cuda_empty_cache(),
    "get_memory_info": lambda device=None, /: _C.cuda_mem_get_info(_accelerator_index(device)),
    "memory_stats": _accelerator_memory_stats,
    "reset_accumulated_memory_stats": lambda device=None, /: _C.cuda_reset_accumulated_memory_stats(
        _accelerator_index(device)
    ),
    "reset_peak_memory_stats": lambda device=None, /: _C.cuda_reset_peak_memory_stats(_accelerator_index(device)),
}


def _making(original: Callable[..., Any], fake: type) -> Callable[..., Any]:
    """Makes a `fake` on threads that see fake devices, and what `original` makes on others."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _C.fake_cuda_devices() and not issubclass(cls, fake):
            return fake(*args, **kwargs)
        return original(cls, *args, **kwargs)

    return __new__


def _replaced_functions() -> None:
    """What answers for the fake devices."""
    reason = "asks for CUDA devices that are not there"
    found: set[int] = set()  # modules have functions of others by name
    for module in (torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.cuda.random):
        for name, answer in ANSWERS.items():
            function = vars(module).get(name)
            if function is not None and id(function) not in found:
                found.add(id(function))
                _while_devices_exist.patch(module, name, partial(_answering, answer=answer), reason, is_traced=True)
    for owner, name, fake in ((torch.cuda.Stream, "__new__", FakeStream), (torch.cuda.Event, "__new__", FakeEvent)):
        _while_devices_exist.patch(owner, name, partial(_making, fake=fake), reason)
    for name, answer in ACCELERATOR.items():
        _while_devices_exist.patch(torch.accelerator, name, partial(_answering, answer=answer), reason, is_traced=True)
    for name, answer in ACCELERATOR_MEMORY.items():
        _while_devices_exist.patch(
            torch.accelerator.memory, name, partial(_answering, answer=answer), reason, is_traced=True
        )
    patch_libraries(_while_devices_exist, _answering)
    patch_comm(_while_devices_exist, _answering)
    # PyTorch's own kernels stand for those of cuDNN.
    make = partial(_answering, answer=lambda tensor: False)
    _while_devices_exist.patch(torch.backends.cudnn, "is_acceptable", make, reason, is_traced=True)


_while_devices_exist = Lease("a block of fake_mode(fake_cuda=...) is open")
_while_devices_exist.declare(_replaced_functions)


def _answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """Calls `answer` on threads that see fake devices, and `original` on others."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return (answer if _C.fake_cuda_devices() else original)(*args, **kwargs)

    return function


@once
def _replace_backward() -> None:
    """Lets the backward pass of fakes see their devices, also of those that outlive the block that made them."""
    reason = "looks for the devices of fakes"
    while_fakes_live.patch(torch.autograd.graph, "_engine_run_backward", _seeing_fakes, reason)


def _seeing_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    def _engine_run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(t_outputs, (tuple, list)) or not any(map(_may_be_fake, t_outputs)):
            return original(t_outputs, *args, **kwargs)
        # Hooks and recomputed forwards may ask torch.cuda, also where the block has ended.
        with _latest_devices():
            return _C.call_backward(original, t_outputs, *args, **kwargs)

    return _engine_run_backward


@contextmanager
def _latest_devices() -> Iterator[None]:
    """Lets a thread that sees no devices see as many as any has seen, described as they were last."""
    if _C.fake_cuda_devices():
        yield
        return
    latest = _C.fake_gpu_number()
    with _block(_C.largest_fake_cuda_devices(), None):
        _C.describe_fake_gpu_again(latest)
        yield


def _may_be_fake(output: Any) -> bool:
    """Looks into wrappers as well: `loss_parallel()` has a backward pass begin at a distributed tensor."""
    if not isinstance(output, torch.Tensor) or _C.is_fake(output):
        return True
    inner = getattr(output, "__tensor_flatten__", None)
    if inner is None:
        return False
    parts = (getattr(output, name) for name in inner()[0])
    return any(_may_be_fake(part) for part in parts if isinstance(part, torch.Tensor))  # a DTensor names its mesh
