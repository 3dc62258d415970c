"""A patch while real tensors have retained their recordings."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import _C
from ..tools.leases import Lease

__all__ = ["while_retained"]

while_retained = Lease("a real tensor has retained its recording", _C.lease_of_retained)


def _swapping(original: Callable[..., None]) -> Callable[..., None]:
    return lambda one, other: _C.swap_tensors(original, one, other)


while_retained.patch(torch._C, "_swap_tensor_impl", _swapping, "raises for tensors with weak references")
