"""Patches for optimizers, whose state and steps mix fakes with real or sparse tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from ... import _C
from ...internals.leases import while_fakes_live
from ..copying import FakeCopy

__all__ = ["install"]


def install() -> None:
    """Install the patches."""
    _patch_sparse_optimizers()
    _patch_optimizer_state()


def _patch_sparse_optimizers() -> None:
    """Patch optimizers that coalesce gradients. Their number of elements then does not affect any metadata."""
    for module, name in (("torch.optim._functional", "sparse_adam"), ("torch.optim.adagrad", "adagrad")):
        functions = importlib.import_module(module)  # `torch.optim` deletes the names of its modules
        while_fakes_live.patch(
            functions, name, _coalescing, "coalesces gradients, which hides their number of elements"
        )


def _coalescing(original: Callable[..., None]) -> Callable[..., None]:
    def step(params: list[torch.Tensor], grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        return original(params, [_as_if_coalesced(grad) for grad in grads], *args, **kwargs)

    return step


def _as_if_coalesced(grad: torch.Tensor) -> torch.Tensor:
    if not _C.is_fake(grad) or grad.layout is not torch.sparse_coo or grad.is_coalesced():
        return grad
    return torch.sparse_coo_tensor(
        grad._indices(), grad._values(), grad.shape, is_coalesced=True, check_invariants=False
    )


def _patch_optimizer_state() -> None:
    """`Optimizer.load_state_dict()` keeps the given tensors, and `step()` would write fakes into them."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def take_over(
            param: torch.Tensor, value: torch.Tensor, param_id: int, param_groups: list[Any], key: object = None
        ) -> Any:
            taken = original(param, value, param_id, param_groups, key)
            if not _C.is_fake(param) or _C.is_deferred(param) or _C.is_fake(taken):
                return taken
            return FakeCopy(None).tensor(taken)

        return take_over

    name = "_process_value_according_to_param_policy"
    while_fakes_live.patch(torch.optim.Optimizer, name, make, "keeps real tensors, into which step() would write fakes")
