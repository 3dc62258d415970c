"""Paged optimizers of bitsandbytes, whose states are in managed memory that the host and a GPU share.

A C library calls `cudaMallocManaged()`. It cannot be loaded without a driver, and its memory is not simulated.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ...internals.patching import Function
from ..current import while_world_is_open

__all__: list[str] = []


@while_world_is_open.replaces(
    "bitsandbytes.functional",
    "get_paged",
    needs="get_paged",
    reason="allocates with a C library that needs a driver",
)
def _get_paged(original: Function, /, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "bitsandbytes' paged optimizers allocate managed memory (cudaMallocManaged), which a dry run does not "
        "simulate. Use the optimizer without paging, such as AdamW8bit in place of PagedAdamW8bit: its states are "
        "then counted on the GPU."
    )
