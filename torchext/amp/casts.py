"""Casts of the arguments and the results of a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["can_autocast", "to_float32", "to_lower_precision"]

T = TypeVar("T")


def to_float32(tree: T) -> T:
    """Return `tree` with its floating point tensors in float32. Autocast does not cast float64 tensors."""
    if isinstance(tree, Tensor):  # the common case
        is_cast = tree.dtype is not torch.float32 and tree.dtype is not torch.float64 and tree.is_floating_point()
        return tree.float() if is_cast else tree  # type: ignore[return-value]
    return _map(tree, lambda tensor: torch.float32)


def to_lower_precision(tree: T) -> T:
    """Return `tree` with its floating point tensors in the dtype to which operators cast them now.

    float64 tensors, and tensors on devices without autocast, do not change.
    """
    return _map(tree, _lower_dtype)


def _lower_dtype(tensor: Tensor) -> torch.dtype:
    device_type = tensor.device.type
    if can_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return tensor.dtype


def can_autocast(device_type: str) -> bool:
    """Return True if `device_type` has autocast. A separate function, because `torch.compile` treats it specially."""
    return torch.amp.is_autocast_available(device_type)


def _map(tree: T, dtype_of: Callable[[Tensor], torch.dtype]) -> T:
    def cast(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype is torch.float64:
            return leaf
        dtype = dtype_of(leaf)
        return leaf if leaf.dtype is dtype else leaf.to(dtype)

    if isinstance(tree, Tensor):
        return cast(tree)  # type: ignore[return-value]
    leaves, structure = pytree.tree_flatten(tree)
    done = [cast(leaf) for leaf in leaves]
    if all(new is old for new, old in zip(done, leaves, strict=True)):
        return tree  # the same object, with its identity and everything in it besides the leaves
    result: T = pytree.tree_unflatten(done, structure)
    return result
