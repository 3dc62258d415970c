"""Tensors that are made of other tensors, such as DTensors."""

from __future__ import annotations

import torch

__all__ = ["storages_of"]


def storages_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold the memory of `tensor`, which may be a wrapper such as a DTensor."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    parts = [getattr(tensor, name) for name in flatten()[0]]  # a DTensor also lists its mesh
    return [member for part in parts if isinstance(part, torch.Tensor) for member in storages_of(part)]
