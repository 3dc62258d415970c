"""Common definitions of the calls for record_kernels.py."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Call", "aten", "make"]

Call: TypeAlias = tuple[torch._ops.OpOverload, tuple[Any, ...]]
"""An operator and its arguments."""

aten = torch.ops.aten


def make(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor on the device."""
    return torch.zeros(sizes, dtype=dtype, device="cuda")
