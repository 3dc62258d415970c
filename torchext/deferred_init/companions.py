"""Tensors that are materialized with a parameter: its gradient, and its state in optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from .. import _C
from ..internals.held_tensors import Held, parts_of, reachable_tensors
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

__all__ = ["companions", "state_of"]

# Optimizers of deferred parameters, by `id()`, because they may define `__eq__`. They create state in their constructor
# (Adagrad), for `torch.distributed.checkpoint`, or in steps on deferred parameters. Without this the state would stay
# deferred, and every later step would be recorded, and replayed from the first one.
_optimizers: dict[int, ref[Optimizer]] = {}


@while_fakes_live.replaces(Optimizer, "__setstate__", reason="makes copies of optimizers, and loaded ones")
@while_fakes_live.replaces(
    Optimizer, "add_param_group", reason="receives the parameters whose state is materialized with them"
)
def _then_watch(original: Function, /, *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)  # raises for missing arguments
    _watch(args[0] if args else kwargs["self"])


def _watch(optimizer: Optimizer) -> None:
    groups = getattr(optimizer, "param_groups", ())
    if any(_is_deferred(param) for group in groups for param in group.get("params", ())):
        key = id(optimizer)
        _optimizers[key] = ref(optimizer, lambda _: _optimizers.pop(key, None))


def companions(tensors: Iterable[torch.Tensor]) -> Iterator[Held]:
    """Yield the deferred tensors that must be materialized with `tensors`.

    All move with their tensor, except step counts, as with `Optimizer.load_state_dict()`.
    """
    optimizers = [optimizer for known in list(_optimizers.values()) if (optimizer := known()) is not None]
    for tensor in tensors:
        if _is_leaf(tensor) and tensor.grad is not None:
            yield from _deferred_in(tensor.grad, "grad", goes_along=True)
        for optimizer in optimizers:
            yield from _state_for(optimizer, tensor)


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view made under `no_grad()`, whose base was then written with gradients
        return False


def state_of(optimizer: Optimizer, materialized: Iterable[torch.Tensor]) -> Iterator[Held]:
    """Yield the deferred tensors in the state of `optimizer`, as `companions()` does.

    Args:
        optimizer: The optimizer.
        materialized: The tensors to materialize. State for other deferred parameters is left out.
    """
    known = set(map(id, materialized))
    for param in list(optimizer.state):
        if id(param) in known or not _is_deferred(param):
            yield from _state_for(optimizer, param)
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        yield from _deferred_in(options, "option", goes_along=False)


def _state_for(optimizer: Optimizer, param: Any) -> Iterator[Held]:
    state = optimizer.state.get(param)
    if isinstance(state, dict):
        for name, value in state.items():
            yield from _deferred_in(value, name, goes_along=name != "step")


def _deferred_in(value: object, name: Any, goes_along: bool) -> Iterator[Held]:
    for tensor in reachable_tensors(value, _is_deferred):
        for part in filter(_C.is_deferred, parts_of(tensor)):
            yield Held(part, str(name), goes_along, False, part is not tensor, tensor)


def _is_deferred(param: object) -> bool:
    return isinstance(param, torch.Tensor) and any(map(_C.is_deferred, parts_of(param)))
