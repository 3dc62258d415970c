"""A stand-in for Triton's CUDA driver in a dry run, and a counter of kernel launches.

Libraries query the driver for the kind of GPU at import, to select configurations.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch

from ...fake.cuda.libraries import launch_observers
from ...internals.imports import when_imported
from ..current import Job, current, while_world_is_open

__all__ = ["triton_in_a_world"]

DRIVER = "triton.runtime.driver"


@contextmanager
def triton_in_a_world(job: Job) -> Iterator[None]:
    """Count kernel launches, and replace the driver if the job has GPUs."""
    launch_observers.append(job.count_launch)
    try:
        _replace_driver()
        yield
    finally:
        launch_observers.remove(job.count_launch)


def _replace_driver() -> None:
    """Replace the driver until the open world ends, if it has GPUs and Triton is imported."""
    job = current()
    config: Any = getattr(sys.modules.get(DRIVER), "driver", None)
    active = getattr(config, "_active", None)
    if job is not None and job.gpu is not None and hasattr(config, "set_active") and not isinstance(active, _Driver):
        job.when_left.callback(setattr, config, "_active", active)
        config.set_active(_Driver())


while_world_is_open.declare(partial(when_imported, DRIVER, _replace_driver))


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
