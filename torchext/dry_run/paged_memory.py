"""Paged optimizers of bitsandbytes, whose states are in managed memory that the host and a GPU share.

A C library calls `cudaMallocManaged()`. It cannot be loaded without a driver, and its memory is not simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, NoReturn

from ..internals.imports import patching
from .current import while_world_is_open

__all__ = ["refusing_paged_memory"]

MODULE = "bitsandbytes.functional"


def refusing_paged_memory() -> AbstractContextManager[None]:
    """Raise an error where bitsandbytes allocates such memory, also if it is imported in the block."""
    return patching(MODULE, ("get_paged",), _patch)


def _patch(module: ModuleType) -> None:
    while_world_is_open.patch(module, "get_paged", _refusing, "allocates with a C library that needs a driver")


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_paged(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "bitsandbytes' paged optimizers allocate managed memory (cudaMallocManaged), which a dry run does not "
            "simulate. Use the optimizer without paging, such as AdamW8bit in place of PagedAdamW8bit: its states are "
            "then counted on the GPU."
        )

    return get_paged
