"""Patches for optimizers, whose state and steps mix fakes with real or sparse tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _C
from ...internals.leases import while_fakes_live
from ...internals.patching import Function
from ..copying import FakeCopy

__all__: list[str] = []


# By name, because `torch.optim` deletes the names of its modules.
@while_fakes_live.replaces(
    "torch.optim.adagrad", "adagrad", reason="coalesces gradients, which hides their number of elements"
)
@while_fakes_live.replaces(
    "torch.optim._functional", "sparse_adam", reason="coalesces gradients, which hides their number of elements"
)
def _step(original: Function, /, params: list[Tensor], grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """The number of elements of coalesced gradients does not affect any metadata."""
    return original(params, [_as_if_coalesced(grad) for grad in grads], *args, **kwargs)


def _as_if_coalesced(grad: Tensor) -> Tensor:
    if not _C.is_fake(grad) or grad.layout is not torch.sparse_coo or grad.is_coalesced():
        return grad
    return torch.sparse_coo_tensor(
        grad._indices(), grad._values(), grad.shape, is_coalesced=True, check_invariants=False
    )


@while_fakes_live.replaces(
    torch.optim.Optimizer,
    "_process_value_according_to_param_policy",
    reason="keeps real tensors, into which step() would write fakes",
)
def _take_over(
    original: Function, param: Tensor, value: Tensor, param_id: int, param_groups: list[Any], key: object = None
) -> Any:
    """`Optimizer.load_state_dict()` keeps the tensors that this returns."""
    taken = original(param, value, param_id, param_groups, key)
    if not _C.is_fake(param) or _C.is_deferred(param) or _C.is_fake(taken):
        return taken
    return FakeCopy(None).tensor(taken)
