"""Checks for functions of PyTorch's, which may be called with anything."""

from __future__ import annotations

import torch

from .. import _C

__all__ = ["is_fake_tensor"]


def is_fake_tensor(obj: object) -> bool:
    """Returns true if `obj` is a tensor, and a fake one."""
    return isinstance(obj, torch.Tensor) and _C.is_fake(obj)
