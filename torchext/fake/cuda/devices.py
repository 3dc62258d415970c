"""Fake CUDA devices: replacement of functions on the threads that have them, and queries of the devices."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch.accelerator._utils import _get_device_index

from ... import _C
from ...internals.dispatch_keys import without_our_keys
from ...internals.leases import Lease
from ...internals.patching import Function

__all__ = [
    "CACHED",
    "DEVICES",
    "MEMORY",
    "QUERIES",
    "answers",
    "check_index",
    "forget_answers",
    "forget_program",
    "index_of",
    "segments",
    "snapshot",
    "traceback",
    "while_devices_exist",
]

while_devices_exist: Lease = Lease("a block of fake_mode(gpu=...) is open")


def answers(owner: Any, functions: Mapping[str, Function], *, reason: str, **options: Any) -> None:
    """Declare functions that are called on threads with fake devices, instead of those with the same names.

    Args:
        owner: The module or the class of the replaced functions.
        functions: The functions that answer, by the names of the replaced ones.
        reason: The PyTorch behavior that needs them.
        **options: Further arguments of `Lease.replaces()`.
    """
    for name, function in functions.items():
        while_devices_exist.replaces(owner, name, reason=reason, **options)(partial(_answer, function))


def _answer(answer: Function, original: Function, /, *args: Any, **kwargs: Any) -> Any:
    return (answer if _C.fake_cuda_devices() else original)(*args, **kwargs)


# ---- Functions of `torch.cuda` that list, select and describe devices


def index_of(device: Any = None) -> int:
    """Return the index of `device`, which may have any form that torch.cuda accepts, and check it."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    check_index(index)
    return index


def check_index(index: int) -> None:
    """Raise the error of the CUDA runtime if the thread has no such fake device."""
    count = _C.fake_cuda_devices()
    if not 0 <= index < count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: device {index} is named, but fake_mode(gpu={count}) has the "
            f"devices cuda:0 to cuda:{count - 1}."
        )


def _set_device(device: Any) -> None:
    torch._C._accelerator_setDeviceIndex(index_of(device))
    _C.set_fake_cuda_initialized()


def _exchange_device(device: int) -> int:
    previous = torch._C._accelerator_getDeviceIndex()
    if device >= 0:
        torch._C._accelerator_exchangeDevice(index_of(device))
    return previous


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    index = index_of(device)
    name, memory, _, _, major, minor, multiprocessors, threads, shared_memory, l2_cache = _C.fake_gpu()
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


@while_devices_exist.replaces(torch.cuda, "_lazy_init", reason="looks for real CUDA devices", is_traced=True)
def _lazy_init(original: Function) -> None:
    """Functions of `torch.cuda` call it first."""
    if _C.fake_cuda_devices():
        _C.set_fake_cuda_initialized()
    elif torch._C._has_cuda:
        original()
    else:
        raise AssertionError("Torch not compiled with CUDA enabled")  # `original` would look for the functions


@while_devices_exist.replaces(torch.cuda, "_is_compiled", reason="looks for real CUDA devices", is_traced=True)
def _is_compiled(original: Function) -> bool:
    """The original would find the functions of `DEVICES` on all threads."""
    return bool(torch._C._has_cuda or _C.fake_cuda_devices())


# Functions of `torch.cuda`, and of `torch._C` in builds for CUDA.
QUERIES: dict[str, Callable[..., Any]] = {
    "_exchange_device": _exchange_device,
    "_lazy_call": lambda call, **kwargs: call(),
    "_maybe_exchange_device": _exchange_device,
    "device_count": lambda: _C.fake_cuda_devices(),
    "get_device_properties": _get_device_properties,
    "is_initialized": lambda: _C.is_fake_cuda_initialized(),
}
DEVICES: dict[str, Callable[..., Any]] = {
    "_cuda_canDeviceAccessPeer": lambda device, peer_device: device != peer_device,
    "_cuda_exchangeDevice": _exchange_device,
    "_cuda_getDevice": lambda: torch._C._accelerator_getDeviceIndex(),
    "_cuda_getDeviceCount": lambda: _C.fake_cuda_devices(),
    "_cuda_hasPrimaryContext": lambda index: index == index_of(index) and _C.is_fake_cuda_initialized(),
    "_cuda_init": lambda: None,
    "_cuda_isInBadFork": lambda: False,
    "_cuda_maybeExchangeDevice": _exchange_device,
    "_cuda_setDevice": _set_device,
}


# ---- Answers about devices that PyTorch keeps

# Functions with a `functools.cache`, by module. Their answers hold for other devices before a block and after it.
CACHED: dict[str, tuple[str, ...]] = {
    "torch": ("get_device_module",),
    "torch._dynamo.debug_utils": ("_cuda_system_info_comment",),
    "torch._inductor.codecache": ("CacheBase.get_system",),
    "torch._inductor.codegen.cuda.cuda_env": ("get_cuda_arch",),
    "torch._inductor.codegen.flydsl.flydsl_scheduling": ("_get_flydsl_device_arch",),
    "torch._inductor.comm_analysis": ("_has_nvlink", "get_gpu_type"),
    "torch._inductor.kernel.mm": ("_is_sm7x_or_older_gpu",),
    "torch._inductor.lookup_table.choices": ("LookupTableChoices._get_device_key",),
    "torch._inductor.runtime.caching.context": ("_CompileContext.accelerator_properties",),
    "torch._inductor.runtime.hints": ("DeviceProperties.create",),
    "torch._inductor.utils": (
        "_get_device_tflops",
        "_triton_supported_fp8_dtypes",
        "get_device_tflops",
        "get_gpu_dram_gbps",
        "get_gpu_type",
        "get_max_num_sms",
        "is_big_gpu",
        "using_b200",
    ),
    "torch._native.flydsl_utils": ("_get_flydsl_device_arch",),
    "torch._native.ops.bmm_outer_product.triton_impl": ("_get_warp_size",),
    "torch._native.ops.linear_cross_entropy.cutedsl_impl": ("_arch_supported",),
    "torch._native.ops.scatter_add.cutedsl_impl": ("_has_sm90_plus",),
    "torch._native.ops.topk.cutedsl_impl": ("_device_major", "_min_rows_for_full_wave"),
    "torch._native.ops.topk.flydsl_impl": ("_min_rows_for_full_wave",),
    "torch._native.utils.capability": ("_arch_ok",),
    "torch._utils_internal": ("max_clock_rate",),
    "torch._vendor.quack.cute_dsl_utils": ("_get_device_capacity_cached", "get_compile_target_capacity"),
    "torch.accelerator": ("get_device_capability",),
    "torch.nn.attention._fa3": ("_get_device_major",),
    "torch.nn.attention._fa4": ("_get_device_major",),
    "torch.nn.attention.varlen": ("_cudnn_version_and_major_capability", "_should_use_cudnn"),
    "torch.utils._helion": ("has_helion",),
    "torch.utils._triton": (
        "_device_supports_tensor_descriptor",
        "_device_supports_tma",
        "has_datacenter_blackwell_tma_device",
        "has_triton",
        "has_triton_cuda_tma_device",
        "has_triton_experimental_host_tma",
        "has_triton_stable_tma_api",
        "has_triton_tensor_descriptor_host_tma",
        "has_triton_tma",
        "has_triton_tma_device",
        "triton_backend",
        "triton_hash_with_backend",
    ),
}


def forget_answers() -> None:
    """Clear the answers about devices that PyTorch keeps."""
    for module, names in CACHED.items():
        if (owner := sys.modules.get(module)) is not None:
            for name in names:
                with suppress(AttributeError):  # not in this release
                    attrgetter(f"{name}.cache_clear")(owner)()


# ---- The memory functions of `torch.cuda` and `torch.accelerator` for fake devices; csrc/extensions/memory counts it


# ---- Snapshots of the simulated allocators, as `torch._C._cuda_memorySnapshot()` returns them


def snapshot(pool: tuple[int, ...] | None) -> dict[str, Any]:
    """Return the segments of a pool, or of all for the pool (0, 0), and all traces."""
    found = segments()
    if pool is not None and any(pool[:2]):
        found = [segment for segment in found if segment["segment_pool_id"] == pool[:2]]
    traces = [[_entry(*row) for row in _C.cuda_memory_trace(device)] for device in range(_C.fake_cuda_devices())]
    return {"segments": found, "device_traces": traces, "allocator_settings": {}, "external_annotations": []}


def segments() -> list[dict[str, Any]]:
    """Return the segments of all devices that have memory."""
    devices = range(_C.fake_cuda_devices())
    return [_segment(device, *row) for device in devices for row in _C.cuda_memory_segments(device) if row[-1]]


def traceback(address: int) -> list[dict[str, Any]] | None:
    """Return the frames that allocated the block at an address, or none."""
    blocks = (block for segment in segments() for block in segment["blocks"])
    return next((block["frames"] for block in blocks if block["address"] == address and block["frames"]), None)


def _segment(
    device: int, stream: int, is_small: bool, pool: tuple[int, int], is_expandable: bool, blocks: list[_C.BlockRow]
) -> dict[str, Any]:
    used = [block for block in blocks if block[3] or block[4]]
    return {
        "device": device,
        "address": blocks[0][0],
        "total_size": sum(block[1] for block in blocks),
        "allocated_size": sum(block[1] for block in blocks if block[3]),
        "active_size": sum(block[1] for block in used),
        "requested_size": sum(block[2] for block in used),
        "stream": stream,
        "segment_type": "small" if is_small else "large",
        "segment_pool_id": pool,
        "is_expandable": is_expandable,
        "frames": [],
        "blocks": [_block(*block) for block in blocks],
    }


def _block(
    address: int, size: int, requested: int, is_allocated: bool, is_awaited: bool, frames: list[_C.Frame]
) -> dict[str, Any]:
    state = "active_allocated" if is_allocated else "active_pending_free" if is_awaited else "inactive"
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": _frames(frames)}


def _entry(
    action: str, address: int, size: int, stream: int, time_us: int, metadata: str, frames: list[_C.Frame]
) -> dict[str, Any]:
    return {
        "action": action,
        "device_free" if action == "oom" else "addr": address,
        "size": size,
        "stream": stream,
        "time_us": time_us,
        "compile_context": "N/A",
        "user_metadata": metadata,
        "pool_id": (0, 0),
        "frames": _frames(frames),
    }


def _frames(frames: list[_C.Frame]) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": function} for file, line, function in frames]


# ---- Memory functions


# `HistoryStacks` (csrc/extensions/memory/device_memory.h) by `context`
STACKS: dict[str | None, int] = {None: 0, "state": 1, "alloc": 1, "all": 2}


def _record_history(
    enabled: str | None, context: str | None = "all", stacks: str = "all", max_entries: int = sys.maxsize, *args: Any
) -> None:
    if enabled not in (None, "state", "all"):
        raise RuntimeError("expected enabled to be 'state', or 'all'")
    if context not in STACKS:
        raise RuntimeError("expected context to be 'state', 'alloc', or 'all'")
    _C.cuda_record_memory_history(enabled is not None, 1 if enabled == "state" else max_entries, STACKS[context])


def _record_history_as_before(
    enabled: bool, record_context: bool = True, trace_alloc_max_entries: int = 1, *args: Any
) -> None:
    _C.cuda_record_memory_history(enabled, trace_alloc_max_entries, int(record_context))


# Memory that the program has allocated without a tensor, by its simulated address.
_raw: dict[int, torch.Tensor] = {}


def _allocate(size: int, stream: int) -> int:
    index = torch.cuda.current_device()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index)):
        memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))
    address = _C.fake_address(memory.untyped_storage())
    _raw[address] = memory
    return address


def _free(mem_ptr: int) -> None:
    if _raw.pop(mem_ptr, None) is None and mem_ptr:
        raise RuntimeError(f"invalid device pointer: {mem_ptr:#x} was not returned by caching_allocator_alloc().")


# Called with the device, and the bytes requested, allowed and free.
_observers: list[Callable[[int, int, int, int], object]] = []


def _observe_out_of_memory(*numbers: int) -> None:
    for observer in tuple(_observers):
        observer(*numbers)


_C.provide("observe_out_of_memory", _observe_out_of_memory)


def _attach_observer(observer: Callable[[int, int, int, int], object]) -> None:
    if not callable(observer):
        raise TypeError(f"_attach_out_of_memory_observer() expected a function, got {observer!r}.")
    _observers.append(observer)


def forget_program() -> None:
    """Free the raw memory that the program has not freed, and forget its observers and this thread's metadata."""
    _raw.clear()
    _C.set_cuda_memory_metadata("")
    _observers.clear()


def _enable_caching(value: bool = True) -> None:
    if not value:
        raise RuntimeError(
            "The caching allocator cannot be disabled on fake CUDA devices, which simulate it. Run the program "
            "without caching_allocator_enable(False)."
        )


@while_devices_exist.replaces(torch._C, "_accelerator_setAllocatorSettings", reason="checks keys in CUDA builds only")
def _set_settings(original: Function, settings: str) -> None:
    """Raise an error for settings that a CUDA build refuses, before they are stored."""
    if _C.fake_cuda_devices():
        _C.check_allocator_settings(settings)
    original(settings)


MEMORY: dict[str, Callable[..., Any]] = {
    "_accelerator_emptyHostCache": _C.cuda_empty_host_cache,
    "_cuda_allocationTraceback": traceback,
    "_cuda_attach_out_of_memory_observer": _attach_observer,
    "_cuda_cudaCachingAllocator_enable": _enable_caching,
    "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
    "_cuda_cudaCachingAllocator_raw_alloc": _allocate,
    "_cuda_cudaCachingAllocator_raw_delete": _free,
    "_cuda_emptyCache": _C.cuda_empty_cache,
    "_cuda_getAllocatorBackend": lambda: "native",
    "_cuda_getMemoryFraction": _C.cuda_memory_fraction,
    "_cuda_getMemoryMetadata": _C.cuda_memory_metadata,
    "_cuda_hostMemoryStats": _C.cuda_host_memory_stats,
    "_cuda_isHistoryEnabled": _C.is_cuda_history_recorded,
    "_cuda_memoryMetadataSupported": lambda: True,
    "_cuda_memorySnapshot": snapshot,
    "_cuda_memoryStats": _C.cuda_memory_stats,
    "_cuda_record_memory_history": _record_history,
    "_cuda_record_memory_history_legacy": _record_history_as_before,
    "_cuda_resetAccumulatedHostMemoryStats": _C.cuda_reset_accumulated_host_memory_stats,
    "_cuda_resetAccumulatedMemoryStats": _C.cuda_reset_accumulated_memory_stats,
    "_cuda_resetPeakHostMemoryStats": _C.cuda_reset_peak_host_memory_stats,
    "_cuda_resetPeakMemoryStats": _C.cuda_reset_peak_memory_stats,
    "_cuda_setMemoryFraction": _C.cuda_set_memory_fraction,
    "_cuda_setMemoryMetadata": _C.set_cuda_memory_metadata,
    "_host_emptyCache": _C.cuda_empty_host_cache,
}


def _accelerator_index(device: Any = None) -> int:
    return index_of(_get_device_index(device, optional=True))


def _accelerator_memory_stats(device: Any = None, /) -> dict[str, Any]:
    return torch.cuda.memory.memory_stats(_accelerator_index(device))


answers(
    torch.accelerator.memory,
    {
        "empty_cache": lambda: _C.cuda_empty_cache(),
        "get_memory_info": lambda device=None, /: _C.cuda_mem_get_info(_accelerator_index(device)),
        "memory_stats": _accelerator_memory_stats,
        "reset_accumulated_memory_stats": lambda device=None, /: _C.cuda_reset_accumulated_memory_stats(
            _accelerator_index(device)
        ),
        "reset_peak_memory_stats": lambda device=None, /: _C.cuda_reset_peak_memory_stats(_accelerator_index(device)),
    },
    reason="looks for real CUDA devices",
    is_traced=True,
)


@while_devices_exist.replaces(torch, "tensor", reason="pins real memory, with the Fake key excluded")
def _tensor(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Make tensors of Python numbers in fake pinned memory.

    `internal_new_from_data()` (tensor_new.cpp) allocates pinned memory with the `Fake` key excluded, and copies it if
    the tensor belongs on another device.
    """
    if not kwargs.get("pin_memory") or not _C.are_factories_fake():
        return original(*args, **kwargs)
    with without_our_keys():
        value = original(*args, **kwargs | {"pin_memory": False, "device": "cpu"})
    pinned = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    _C.copy_value(pinned, value.detach())
    device = kwargs.get("device")
    return (pinned if device is None else pinned.to(device)).requires_grad_(value.requires_grad)
