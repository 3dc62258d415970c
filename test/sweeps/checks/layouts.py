"""Layouts in which checks call operators again."""

from __future__ import annotations

import torch
from comparisons import channels_last, reversed_strides, with_gaps
from sweeps.operators import OnTensor
from torch import Tensor

__all__ = ["LAYOUTS"]


def expanded(tensor: Tensor) -> Tensor:
    """Return the first row for all rows."""
    return tensor[:1].expand_as(tensor) if tensor.dim() and len(tensor) else tensor.clone()


def row(tensor: Tensor) -> Tensor:
    """Return a copy that is a part of a larger tensor."""
    return torch.stack([tensor, tensor])[1]


LAYOUTS: tuple[OnTensor, ...] = (reversed_strides, with_gaps, channels_last, expanded, row)
