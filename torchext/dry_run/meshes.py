"""What PyTorch remembers of the meshes of devices of a world that has ended."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["forget_meshes"]


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
