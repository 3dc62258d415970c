"""Checks for functions of PyTorch's, which may be called with anything."""

from __future__ import annotations

import torch

from .. import _C

__all__ = ["is_fake_tensor", "is_wrapper_of_fakes", "storages_of"]


def is_fake_tensor(obj: object) -> bool:
    """Returns true if `obj` is a tensor, and a fake one."""
    return isinstance(obj, torch.Tensor) and _C.is_fake(obj)


def is_wrapper_of_fakes(obj: object) -> bool:
    """Returns true if `obj` is a wrapper, such as a DTensor, of fakes that nobody will make real."""
    if not isinstance(obj, torch.Tensor) or _C.is_fake(obj):
        return False
    return any(_C.is_fake(member) and not _C.is_deferred(member) for member in storages_of(obj) if member is not obj)


def storages_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that hold the memory of `tensor`, which may be a wrapper such as a DTensor."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    parts = [getattr(tensor, name) for name in flatten()[0]]  # a DTensor names its mesh, too
    return [member for part in parts if isinstance(part, torch.Tensor) for member in storages_of(part)]
