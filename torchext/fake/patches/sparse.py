"""Patches for the constructors of sparse tensors."""

from __future__ import annotations

from typing import Any

import torch

from ... import _C
from ...internals.dispatch_keys import without_our_keys
from ...internals.leases import while_fakes_live
from ...internals.patching import Function
from ..copying import FakeCopy

__all__: list[str] = []


@while_fakes_live.replaces(
    torch,
    *(f"sparse_{name}_tensor" for name in ("coo", "csr", "csc", "bsr", "bsc", "compressed")),
    reason="makes real members from Python data",
)
def _construct(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Make the result of `original` fake in `fake_mode`, like `torch.tensor()`, unless its arguments are tensors."""
    is_given = any(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values()))
    if is_given or not _C.are_factories_fake():
        return original(*args, **kwargs)
    device = torch.empty(0, device=kwargs.get("device")).device
    if device.type == "meta":
        return original(*args, **kwargs)
    with without_our_keys():
        constant = original(*args, **{**kwargs, "device": "cpu"})
    return FakeCopy(device).tensor(constant)
