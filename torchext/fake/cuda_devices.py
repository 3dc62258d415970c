"""The functions of `torch.cuda` that list, select and describe fake devices."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from .. import _C
from .cuda_streams import synchronize

__all__ = ["DEVICES", "index_of"]


def index_of(device: Any = None) -> int:
    """Return the index of `device`, which may have any form that torch.cuda accepts, and check it."""
    index = torch.cuda._utils._get_device_index(device, optional=True)
    count = _C.fake_cuda_devices()
    if not 0 <= index < count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: device {index} is named, but fake_mode(gpu={count}) has the "
            f"devices cuda:0 to cuda:{count - 1}."
        )
    return index


def _set_device(device: Any) -> None:
    if torch.cuda._utils._get_device_index(device, optional=True) >= 0:  # negative ones are ignored, as in PyTorch
        torch._C._accelerator_setDeviceIndex(index_of(device))


def _exchange_device(device: int) -> int:
    previous = torch._C._accelerator_getDeviceIndex()
    if device >= 0:
        torch._C._accelerator_exchangeDevice(index_of(device))
    return previous


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    index = index_of(device)
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


def _synchronize(device: Any = None) -> None:
    synchronize(index_of(device))


def _do_nothing() -> None:
    pass


DEVICES: dict[str, Callable[..., Any]] = {
    "_exchange_device": _exchange_device,
    "_lazy_init": _do_nothing,
    "_maybe_exchange_device": _exchange_device,
    "current_device": lambda: torch._C._accelerator_getDeviceIndex(),
    "device_count": lambda: _C.fake_cuda_devices(),
    "get_device_capability": _get_device_capability,
    "get_device_name": _get_device_name,
    "get_device_properties": _get_device_properties,
    "init": _do_nothing,
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "set_device": _set_device,
    "synchronize": _synchronize,
}
