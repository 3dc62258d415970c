"""The memory functions of `torch.cuda` and `torch.accelerator` for fake devices; csrc/memory counts the memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.accelerator._utils import _get_device_index

from .. import _C
from ..tools.dispatch_keys import without_our_keys
from .cuda_devices import index_of

__all__ = ["ACCELERATOR_MEMORY", "MEMORY", "checking_settings", "forget_raw_memory", "pinning_numbers"]


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
    """Implement the arguments that PyTorch calls legacy."""
    _C.cuda_record_memory_history(enabled, trace_alloc_max_entries, int(record_context))


def _set_memory_fraction(fraction: float, device: Any = None) -> None:
    if not isinstance(fraction, float):
        raise TypeError("Invalid type for fraction argument, must be `float`")
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    _C.cuda_set_memory_fraction(fraction, index_of(device))


def _device_memory_used(device: Any = None) -> int:
    free, total = _C.cuda_mem_get_info(index_of(device))
    return total - free


def _memory_fraction(device: Any = None) -> float:
    return _C.cuda_memory_fraction(index_of(device))


# Memory that the program has allocated without a tensor, by its simulated address.
_raw: dict[int, torch.Tensor] = {}


def _allocate(size: int, device: Any = None, stream: Any = None) -> int:
    index = index_of(device)
    if stream is None:
        stream = torch.cuda.current_stream(index)
    if isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream, device=index)
    elif not isinstance(stream, torch.cuda.Stream):
        raise TypeError(
            "Invalid type for stream argument, must be `torch.cuda.Stream` or `int` representing a pointer to an "
            "existing stream"
        )
    with torch.cuda.stream(stream):
        memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))
    address = _C.fake_address(memory.untyped_storage())
    _raw[address] = memory
    return address


def _free(mem_ptr: int) -> None:
    if _raw.pop(mem_ptr, None) is None and mem_ptr:
        raise RuntimeError(f"invalid device pointer: {mem_ptr:#x} was not returned by caching_allocator_alloc().")


def forget_raw_memory() -> None:
    """Free the raw memory that the program has not freed."""
    _raw.clear()


def _enable_caching(value: bool = True) -> None:
    if not value:
        raise RuntimeError(
            "The caching allocator cannot be disabled on fake CUDA devices, which simulate it. Run the program "
            "without caching_allocator_enable(False)."
        )


def _reset_host_stats() -> None:
    """Do nothing: pinned memory is not counted."""


def checking_settings(original: Callable[[str], None]) -> Callable[[str], None]:
    """Raise an error for settings that a CUDA build refuses, before they are stored."""

    def set_settings(settings: str) -> None:
        if _C.fake_cuda_devices():
            _C.check_allocator_settings(settings)
        original(settings)

    return set_settings


MEMORY: dict[str, Callable[..., Any]] = {
    "_record_memory_history": _record_memory_history,
    "_snapshot": _snapshot,
    "caching_allocator_alloc": _allocate,
    "caching_allocator_delete": _free,
    "caching_allocator_enable": _enable_caching,
    "device_memory_used": _device_memory_used,
    "empty_cache": lambda: _C.cuda_empty_cache(),
    "get_allocator_backend": lambda: "native",
    "get_per_process_memory_fraction": _memory_fraction,
    "mem_get_info": lambda device=None: _C.cuda_mem_get_info(index_of(device)),
    "memory_snapshot": lambda mempool_id=None, include_traces=True: _C.cuda_memory_segments(),
    "memory_stats_as_nested_dict": lambda device=None: _C.cuda_memory_stats(index_of(device)),
    "reset_accumulated_memory_stats": lambda device=None: _C.cuda_reset_accumulated_memory_stats(index_of(device)),
    "reset_peak_memory_stats": lambda device=None: _C.cuda_reset_peak_memory_stats(index_of(device)),
    "reset_accumulated_host_memory_stats": _reset_host_stats,
    "reset_peak_host_memory_stats": _reset_host_stats,
    "set_per_process_memory_fraction": _set_memory_fraction,
}


def _accelerator_index(device: Any = None) -> int:
    return index_of(_get_device_index(device, optional=True))


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


def pinning_numbers(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make tensors of Python numbers in fake pinned memory.

    `internal_new_from_data()` (tensor_new.cpp) allocates pinned memory with the `Fake` key excluded, and copies it if
    the tensor belongs on another device.
    """

    def tensor(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.get("pin_memory") or not _C.are_factories_fake():
            return original(*args, **kwargs)
        with without_our_keys():
            value = original(*args, **kwargs | {"pin_memory": False, "device": "cpu"})
        pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        _C.copy_value(pinned, value.detach())
        device = kwargs.get("device")
        return (pinned if device is None else pinned.to(device)).requires_grad_(value.requires_grad)

    return tensor
