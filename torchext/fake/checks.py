"""Checks for patched PyTorch functions, whose arguments can be any object."""

from __future__ import annotations

import torch

from .. import _C
from ..internals.held_tensors import parts_of

__all__ = ["is_fake_tensor", "is_wrapper_of_fakes"]


def is_fake_tensor(obj: object) -> bool:
    """Return true if `obj` is a tensor, and a fake one."""
    return isinstance(obj, torch.Tensor) and _C.is_fake(obj)


def is_wrapper_of_fakes(obj: object) -> bool:
    """Return true if `obj` is a wrapper, such as a DTensor, of fakes that are not deferred."""
    if not isinstance(obj, torch.Tensor) or _C.is_fake(obj):
        return False
    return any(_C.is_fake(member) and not _C.is_deferred(member) for member in parts_of(obj) if member is not obj)
