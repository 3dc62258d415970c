"""The block in which operators are recorded, and adaptations of PyTorch to recordings.

The adaptations are for functions that inductor has compiled, optimizers, and distributed checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from .. import _C
from ..fake.patches.storages import make_real
from ..internals.dispatch_keys import is_constructing, without_our_keys
from ..internals.held_tensors import Held, parts_of, reachable_tensors, shows_all
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

__all__ = ["Recording", "companions", "state_of"]


class Recording:
    """Records operators on the tensors that are constructed in the block, with their source lines if `trace` is set."""

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        while_fakes_live.acquire()
        if self._trace:
            _C.enter_tracing()
        try:
            _C.enter_deferred_init()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            _C.leave_deferred_init()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._trace:
            _C.leave_tracing()
        while_fakes_live.release()


# ---- Functions that inductor has compiled, in constructors
#
# Their kernels read memory without calling an operator. So their arguments are materialized, and their results are
# real.


@while_fakes_live.replaces(
    "torch._inductor.output_code:CompiledFxGraph", "__call__", reason="runs kernels that read memory"
)
def _call(original: Function, self: object, inputs: Any) -> Any:
    if not is_constructing():
        return original(self, inputs)
    make_real(inputs)
    with without_our_keys():
        return original(self, inputs)


# ---- Tensors that are materialized with a parameter: its gradient, and its state in optimizers


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


# ---- `torch.distributed.checkpoint.save()` of deferred tensors: each is computed when it is written
#
# PyTorch's default planner returns the tensors one by one. Its file writer keeps all of them until the file is closed,
# although only safetensors files need this. So the planner computes the tensors, and written tensors are freed.


PLANNER = "torch.distributed.checkpoint.default_planner"

SLACK = 16 << 20
"""The freed memory that the process may keep, in bytes."""


class _Computed(threading.local):
    """The last tensor that a thread computed for writing."""

    storage: torch.UntypedStorage | None = None


_computed = _Computed()


@while_fakes_live.replaces(
    f"{PLANNER}:DefaultSavePlanner", "transform_object", reason="passes tensors to writers, which read them"
)
def _transform_object(original: Function, self: Any, write_item: Any, object: Any) -> Any:  # noqa: A002
    if isinstance(object, torch.Tensor) and _C.is_deferred(object):
        object = _C.evaluate(_own(object.detach()))  # noqa: A001
        if type(self).__module__ == PLANNER:  # other planners may keep their tensors
            _computed.storage = object.untyped_storage()
    return original(self, write_item, object)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its own storage and the same elements. The writer would clone a view."""
    return tensor if shows_all(tensor) else tensor.clone()


@while_fakes_live.replaces(
    "torch.distributed.checkpoint.filesystem", "_write_item", reason="keeps written tensors until the file ends"
)
def _write_item(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    data, serialization = _argument(args, kwargs, 2, "data"), _argument(args, kwargs, 5, "serialization_format")
    computed, _computed.storage = _computed.storage, None
    is_written = getattr(serialization, "name", "TORCH_SAVE") == "TORCH_SAVE"
    if is_written and computed is not None and isinstance(data, torch.Tensor):
        storage = data.untyped_storage()
        if storage._cdata == computed._cdata:
            storage.resize_(0)
            _C.RecycledMemory(SLACK).trim()
    return result


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)
