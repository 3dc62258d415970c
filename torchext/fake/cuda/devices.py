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

from ... import _C
from ...internals.leases import Lease
from ...internals.patching import Function

__all__ = [
    "CACHED",
    "DEVICES",
    "QUERIES",
    "answers",
    "check_index",
    "forget_answers",
    "index_of",
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
