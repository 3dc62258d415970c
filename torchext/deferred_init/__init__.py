"""Deferred initialization: construct a model now, compute its parameters later, with the same bits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from .. import _C
from ..tools.held_tensors import Held, held_tensors, is_wrapper, parts_of
from ..tools.leases import while_fakes_live
from ..tools.progress import progress_bar
from ..tools.source_lines import tracing
from . import inductor, ranks
from .companions import companions, state_of, watch_optimizers
from .explanations import Explanation, RecordedOperation, RecordedValue, explain, export_graph
from .plans import PlannedOperation, ReplayPlan, plan
from .summaries import summary

__all__ = [
    "Explanation",
    "PlannedOperation",
    "RecordedOperation",
    "RecordedValue",
    "ReplayPlan",
    "defer_again",
    "deferred_init",
    "explain",
    "export_graph",
    "is_deferred",
    "materialize_module",
    "materialize_tensor",
    "plan",
    "summary",
    "tracing",
]

P = ParamSpec("P")
T = TypeVar("T")
Device: TypeAlias = torch.device | str | int


@overload
def deferred_init(fn: Callable[..., T], /, *args: Any, trace: bool, **kwargs: Any) -> T: ...
@overload
def deferred_init(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
def deferred_init(fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Calls `fn(*args, **kwargs)` and defers the initialization of the tensors that it constructs.

    They are fake, and all that is done to them is recorded, here and after the call. `materialize_tensor` and
    `materialize_module` make them real, with the values that `fn` would have given them. The CPU's random generators
    are left where `fn` would have left them; operators that draw from others do so when they are materialized.

    Args:
        fn: Usually a `Module` class, but anything callable will do.
        *args: Positional arguments of `fn`.
        **kwargs: Keyword arguments of `fn`. One of them is ours, unless `fn` names a parameter of its own so: with
            `trace=True`, operators are recorded with the lines that they were recorded for, as under `tracing()`.

    Returns:
        What `fn` returns.

    Example:
        >>> model = deferred_init(torch.nn.Linear, 4, 4)
        >>> model.weight
        Parameter containing:
        tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', requires_grad=True, fake=True)
    """
    if kwargs.get("trace") is not None and not _has_parameter(fn, "trace"):
        with tracing() if kwargs.pop("trace") else nullcontext():
            return deferred_init(fn, *args, **kwargs)
    inductor.teach_inductor()
    ranks.teach_distributed_tensors()
    with while_fakes_live.hold():
        _C.enter_deferred_init()
        try:
            return fn(*args, **kwargs)
        finally:
            _C.leave_deferred_init()


while_fakes_live.declare(watch_optimizers, inductor.install)


def _has_parameter(fn: Callable[..., object], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a builtin, which does not tell
        return False


def is_deferred(obj: torch.Tensor | Module) -> bool:
    """Returns true if `obj` has not been materialized yet.

    Args:
        obj: A tensor, or a module. A module is deferred while any of the tensors is that `materialize_module` would
            make real.

    Raises:
        TypeError: `obj` is neither.
    """
    if isinstance(obj, torch.Tensor):
        return any(map(_C.is_deferred, parts_of(obj)))
    if isinstance(obj, Module):
        return any(_C.is_deferred(held.tensor) for held in held_tensors(obj))
    raise TypeError(f"is_deferred() takes a tensor or a module, but `obj` is a {type(obj).__name__}.")


def materialize_tensor(
    tensor: torch.Tensor,
    *,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    retain_graph: bool = False,
) -> torch.Tensor:
    """Makes `tensor` real, in place.

    All references to `tensor`, and its views, show the real values afterwards.

    Args:
        tensor: A deferred tensor. A real one is left as it is, and where it is.
        device: Where to put it, if not on the device that it was recorded on. Its values are those of the recorded one.
        dtype: What to convert it to, if it is floating point or complex. Others keep their dtype.
        retain_graph: Keep the recording, for `defer_again`.

    Returns:
        `tensor`.

    Raises:
        TypeError: `tensor` is not a tensor, or `dtype` is neither floating point nor complex.
        ValueError: `tensor` is fake, but was not constructed by `deferred_init`. Or `device` is one on which tensors
            have no values. Or `dtype` is given and another tensor shows the same memory in another dtype.
        RuntimeError: A real tensor that a recorded operator reads has been changed in place since. `tensor` is
            left as it was.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"materialize_tensor() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    parts = list(parts_of(tensor))
    if is_wrapper(tensor):
        _check_wrappers_stay(parts, device, dtype)
        tensors = _Tensors([], [], parts)
    else:
        tensors = _Tensors(parts, [], [])
    tensors.add(companions([tensor]))
    tensors.materialize(device, dtype, retain_graph)
    return tensor


@overload
def materialize_module(
    module: Module,
    buffers_only: bool = False,
    check_fn: Callable[[Module], bool] | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    retain_graph: bool = False,
    progress: bool = False,
    check_ranks: bool | ProcessGroup = False,
) -> None: ...
@overload
def materialize_module(
    module: Module,
    optimizer: Optimizer | Sequence[Optimizer],
    /,
    *,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    retain_graph: bool = False,
    progress: bool = False,
    check_ranks: bool | ProcessGroup = False,
) -> None: ...
def materialize_module(
    module: Module,
    buffers_only: bool | Optimizer | Sequence[Optimizer] = False,
    check_fn: Callable[[Module], bool] | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    retain_graph: bool = False,
    progress: bool = False,
    check_ranks: bool | ProcessGroup = False,
) -> None:
    """Makes the tensors of `module` and its descendants real, in place.

    Tied parameters stay tied, and every parameter and buffer stays the object that it is. Tensors that a module holds
    as plain attributes are made real too, also those in containers, in other objects such as distributions, and in
    modules that are not registered, for example in a list. A module that `module` is a part of, and only refers to, is
    left as it is. Either all of them become real, or, on an error, none.

    Gradients become real with their parameters, and so does the state that optimizers keep for them, if they were given
    the parameters while these were deferred. Pass other optimizers, and those that keep more than that, such as a
    learning rate that is a tensor, as `optimizer`.

    With `device` or `dtype` the module becomes what `module.to(device, dtype)` would make of the real one: parameters
    and buffers move there, plain attributes stay where they were recorded, unless they share memory with one that
    moves. Only one tensor at a time, with those that share its memory, is in memory twice. So the tensors become real
    one after another: if an error stops this, those before it are real, the others are still deferred, and another call
    continues from there.

    Args:
        module: The module to materialize. What is real already is left as it is, and where it is.
        buffers_only: Leave the parameters deferred. An optimizer in this position is taken as `optimizer`.
        check_fn: Decides for each module, with its descendants asked separately, whether to materialize the tensors
            that it holds itself.
        optimizer: One or more optimizers. All of their state becomes real, except that for parameters that stay
            deferred.
        device: Where to put parameters and buffers, if not on the devices that they were recorded on.
        dtype: What to convert floating point and complex parameters and buffers to.
        retain_graph: Keep the recording, for `defer_again`. Otherwise it is freed.
        progress: Show a bar of bytes, and their rate, while it lasts. Needs tqdm.
        check_ranks: Whether to ask first if all processes of the default group, or of the given one, have recorded the
            same random numbers and constants for tensors of the same names, whatever parts of them each holds. All of
            them call this then. It takes milliseconds.

    Raises:
        TypeError: `module` is not a module, or `dtype` is neither floating point nor complex.
        ValueError, RuntimeError: As for `materialize_tensor`.
        ValueError: `check_ranks` is set and there is no process group.
        RuntimeError: `check_ranks` is set and the processes differ. All of them raise this; it names the first tensor
            and, if it was recorded under `tracing()`, the line.
        ImportError: `progress` is set and tqdm is not installed.
    """
    if not isinstance(module, Module):
        raise TypeError(f"materialize_module() takes a module, but `module` is a {type(module).__name__}.")
    if isinstance(buffers_only, Optimizer | Sequence):
        if optimizer:
            raise TypeError("materialize_module() takes optimizers in one place, but they were given in two.")
        optimizer = buffers_only
        buffers_only = False
    optimizers = _optimizers(optimizer)
    tensors = _Tensors([], [], [])
    held = list(held_tensors(module, buffers_only, check_fn))
    tensors.add(held)
    _check_wrappers_stay(tensors.wrapped, device, dtype)
    if check_ranks is not False:
        ranks.check_ranks(held, None if check_ranks is True else check_ranks)
    wholes = list({id(part.whole): part.whole for part in held}.values())
    tensors.add(companions(wholes))
    for one in optimizers:
        tensors.add(state_of(one, wholes))
    tensors.materialize(device, dtype, retain_graph, progress)


def _optimizers(given: Optimizer | Sequence[Optimizer] | None) -> Sequence[Optimizer]:
    optimizers = [given] if isinstance(given, Optimizer) else given or ()
    for one in optimizers if isinstance(optimizers, Sequence) else [optimizers]:
        if not isinstance(one, Optimizer):
            raise TypeError(f"materialize_module() takes optimizers, but was given a {type(one).__name__}.")
    return optimizers


class _Tensors(NamedTuple):
    """What is to be made real: in the place that was asked for, or where it was recorded."""

    placed: list[torch.Tensor]
    others: list[torch.Tensor]
    wrapped: list[torch.Tensor]

    def add(self, tensors: Iterable[Held]) -> None:
        for held in tensors:
            (self.wrapped if held.is_part else self.placed if held.is_registered else self.others).append(held.tensor)

    def materialize(
        self, device: Device | None, dtype: torch.dtype | None, retain_graph: bool, progress: bool = False
    ) -> None:
        others = self.others + self.wrapped
        total = _count_bytes(self.placed + others) if progress else 0
        with progress_bar(total, progress) as step:
            _C.materialize(self.placed, others, _device(device), dtype, retain_graph, step)


def defer_again(obj: torch.Tensor | Module) -> None:
    """Drops the values of what was materialized with `retain_graph=True`, and defers it again.

    The memory is freed. Tensors stay the objects that they are, and so do their ties and views. Materializing again
    gives the recorded values, bit for bit, whatever has been done to the materialized ones. Either all tensors are
    deferred, or, on an error, everything stays as it is. Gradients are not touched.

    Args:
        obj: A tensor, or a module. What is deferred already is left as it is, and so is what a module holds as plain
            attributes and was not materialized with `retain_graph=True`.

    Raises:
        TypeError: `obj` is neither.
        ValueError: Nothing was retained of a parameter or a buffer, or it was given other data since (as by
            `module.half()`) or resized.
        RuntimeError: The recorded values cannot be computed any more, because a real tensor that a recorded operator
            reads has been changed in place.
    """
    if isinstance(obj, torch.Tensor):
        parts = list(parts_of(obj))
        for part in parts:
            _check_retained("The tensor", part)
        with while_fakes_live.hold():
            _C.defer_again(parts)
        return
    if not isinstance(obj, Module):
        raise TypeError(f"defer_again() takes a tensor or a module, but `obj` is a {type(obj).__name__}.")
    tensors = []
    for held in held_tensors(obj):
        if held.is_registered:
            _check_retained(f"`{held.name}`", held.tensor)
        if held.is_registered or _C.is_retained(held.tensor):
            tensors.append(held.tensor)
    with while_fakes_live.hold():
        _C.defer_again(tensors)


def _check_retained(name: str, tensor: torch.Tensor) -> None:
    if not (_C.is_deferred(tensor) or _C.is_retained(tensor)):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} cannot be deferred again, because nothing is kept of how its data "
            "came about. Materialize with `retain_graph=True`, and give it no other data (as `module.half()` does)."
        )


def _check_wrappers_stay(parts: list[torch.Tensor], device: Device | None, dtype: torch.dtype | None) -> None:
    """A wrapper knows where its parts are (`DTensor` by its mesh), and would not learn of a move."""
    for part in filter(_C.is_deferred, parts):
        to = _device(device) or part.device
        is_there = to.type == part.device.type and to.index in (None, part.device.index)
        keeps_dtype = dtype in (None, part.dtype) or not (part.is_floating_point() or part.is_complex())
        if not (is_there and keeps_dtype):
            raise ValueError(
                f"A part of shape {tuple(part.shape)} of a DTensor, or of another tensor that wraps others, cannot be "
                "materialized with another device or dtype. Convert the module before it is wrapped, or after it is "
                "materialized."
            )


def _device(device: Device | None) -> torch.device | None:
    return None if device is None else torch.device(device)


def _count_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Returns the size of the storages to materialize."""
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters refuse to show their storage
        storages = [tensor.untyped_storage() for tensor in tensors if _C.is_deferred(tensor)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
