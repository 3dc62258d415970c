"""What PyTorch remembers of the meshes of devices of a world that has ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["meshes_of_its_own"]


@contextmanager
def meshes_of_its_own() -> Iterator[None]:
    """Lets nothing be remembered in the block from before it, and nothing after it from the block."""
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    tracker = getattr(random, "_rng_tracker", None)
    _forget(None)
    try:
        yield
    finally:
        _forget(tracker)


def _forget(tracker: Any) -> None:
    forget_meshes()
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:
        random._rng_tracker = tracker  # of the generators of the devices of a mesh


def forget_meshes() -> None:
    """Empties the caches of DTensor's propagation of shardings.

    What they return is on a mesh that equals the one asked for, and may be of another world, whose groups are gone.
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
