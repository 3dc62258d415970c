"""What becomes real with a parameter: its gradient, and what optimizers keep for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from .. import _C
from ..tools.held_tensors import Held, parts_of, reachable_tensors
from ..tools.leases import while_fakes_live

__all__ = ["companions", "state_of", "watch_optimizers"]

# Optimizers that were given deferred parameters, by `id()`: they may define how they compare. They make state in their
# constructor (Adagrad), for `torch.distributed.checkpoint`, or in steps on deferred parameters. It would stay deferred,
# and every step would be recorded and replayed from the first one on.
_optimizers: dict[int, ref[Optimizer]] = {}


def watch_optimizers() -> None:
    """Watches for optimizers of deferred parameters."""
    while_fakes_live.patch(
        Optimizer, "add_param_group", _watching, "is told of the parameters whose state is to become real"
    )
    while_fakes_live.patch(Optimizer, "__setstate__", _watching, "makes copies of optimizers, and loaded ones")


def _watching(original: Callable[..., None]) -> Callable[..., None]:
    def method(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)  # raises for what is missing
        _watch(args[0] if args else kwargs["self"])

    return method


def _watch(optimizer: Optimizer) -> None:
    groups = getattr(optimizer, "param_groups", ())
    if any(_is_deferred(param) for group in groups for param in group.get("params", ())):
        key = id(optimizer)
        _optimizers[key] = ref(optimizer, lambda _: _optimizers.pop(key, None))


def companions(tensors: Iterable[torch.Tensor]) -> Iterator[Held]:
    """Yields what is deferred and has to become real with `tensors`.

    All of it goes where its tensor goes, but for the counts of steps, as with `Optimizer.load_state_dict()`.
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
    except RuntimeError:  # a view that `no_grad()` made and whose base was written with gradients since: no leaf
        return False


def state_of(optimizer: Optimizer, materialized: Iterable[torch.Tensor]) -> Iterator[Held]:
    """Yields what `optimizer` keeps that is deferred, as `companions()` does.

    Args:
        optimizer: The optimizer.
        materialized: What is about to become real. State for other parameters that are deferred is left out.
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
