"""PyTorch's caches for device meshes, which outlive a world."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["separate_meshes"]


@contextmanager
def separate_meshes() -> Iterator[None]:
    """Separate the caches in the block from those before and after it."""
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    tracker = getattr(random, "_rng_tracker", None)
    _clear(None)
    try:
        yield
    finally:
        _clear(tracker)


def _clear(tracker: Any) -> None:
    clear_mesh_caches()
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:
        random._rng_tracker = tracker  # tracks the generators of the devices of a mesh


def clear_mesh_caches() -> None:
    """Clear the caches of DTensor's sharding propagation.

    Their results are on a mesh that equals that of the call, but may belong to another world, whose groups are gone.
    """
    tensor: Any = sys.modules.get("torch.distributed.tensor._api")
    if tensor is None:
        return
    propagate = tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    clear = getattr(propagate, "cache_clear", None) or getattr(getattr(propagate, "cache", None), "cache_clear", None)
    if clear is not None:
        clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()
