"""Deferred initialization: construct a model now, compute its parameters later, with the same bits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

import torch
from torch.distributed import ProcessGroup
from torch.nn import Module
from torch.optim import Optimizer

from .. import _C
from ..internals.arguments import check_is_dtype
from ..internals.calls import Block
from ..internals.events import tracing
from ..internals.held_tensors import Held, held_tensors, is_wrapper, parts_of
from ..internals.imports import names_from
from ..internals.leases import while_fakes_live
from ..internals.text import in_units, progress_bar
from . import recording
from .explanations import Explanation, RecordedOperation, RecordedValue, explain, export_graph
from .recording import Recording, companions, state_of
from .summaries import ModuleSummary, OperatorSummary, PlannedOperation, ReplayPlan, Summary, plan, summary

if TYPE_CHECKING:
    from ..check_init import InitCheck, MeshCheck, TensorCheck, check_init
else:  # hidden from type checkers, which otherwise accept any name
    __getattr__ = names_from(__name__, ".check_init")

__all__ = [
    "Explanation",
    "InitCheck",
    "MeshCheck",
    "ModuleSummary",
    "OperatorSummary",
    "PlannedOperation",
    "RecordedOperation",
    "RecordedValue",
    "ReplayPlan",
    "Summary",
    "TensorCheck",
    "check_init",
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


def __dir__() -> list[str]:
    return __all__


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=Module)
Device: TypeAlias = torch.device | str | int

logger: logging.Logger = logging.getLogger(__name__)


@overload
def deferred_init(*, trace: bool = False) -> Block: ...
@overload
def deferred_init(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
def deferred_init(fn: Callable[..., T] | EllipsisType = ..., /, *args: Any, **kwargs: Any) -> T | Block:
    """Call `fn(*args, **kwargs)` and defer the initialization of the tensors that it constructs.

    The tensors are fake, and every operator on them is recorded, during the call and after it. `materialize_tensor` and
    `materialize_module` compute the values that `fn` would have given them. The CPU's random generators end in the
    state in which `fn` would leave them. Operators that draw from other generators draw when they are materialized.

    Without `fn`, this is a context manager that defers the construction in its block, or a decorator that defers the
    construction in a function. Decorated generators and coroutines are in the block while they run.

    Args:
        fn: A `Module` class, or any other callable.
        *args: Positional arguments of `fn`.
        **kwargs: Keyword arguments of `fn`. Without `fn`, the only one is `trace`: with `trace=True`, operators are
            recorded with their source lines, as under `tracing()`.

    Returns:
        The result of `fn`. Without `fn`, a context manager that is also a decorator.

    Raises:
        TypeError: `fn` is not callable, or there is no `fn` and a keyword is not `trace`. Or the decorator is applied
            to a class.

    Example:
        >>> model = deferred_init(torch.nn.Linear, 4, 4)
        >>> model.weight
        Parameter containing:
        tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', requires_grad=True, deferred=True)
        >>> with deferred_init():
        ...     model = torch.nn.Linear(4, 4)
    """
    if isinstance(fn, EllipsisType):
        for name in kwargs.keys() - {"trace"}:
            raise TypeError(
                f"deferred_init() got an unexpected keyword argument '{name}'. Pass a function as the first positional "
                "argument, as in deferred_init(fn, ...)."
            )
        return Block("deferred_init", partial(Recording, **kwargs), is_resumable=True)
    if not callable(fn):
        raise TypeError(f"deferred_init() takes a function or a class, but `fn` is a {type(fn).__name__}.")
    with Recording():
        return fn(*args, **kwargs)


def is_deferred(obj: torch.Tensor | Module) -> bool:
    """Return True if `obj` has not been materialized.

    Args:
        obj: A tensor, or a module. A module is deferred while `materialize_module` would materialize any of its
            tensors.

    Raises:
        TypeError: `obj` is neither a tensor nor a module.
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
    """Compute the values of `tensor`, in place.

    All references to `tensor`, and its views, have the real values afterwards.

    Args:
        tensor: A deferred tensor. A real tensor is not changed or moved.
        device: The device of the result. Default: the recorded device. The values are those of the recorded device.
        dtype: The dtype of the result, if `tensor` is floating point or complex. Other tensors keep their dtype.
        retain_graph: Keep the recording, for `defer_again`.

    Returns:
        `tensor`.

    Raises:
        TypeError: `tensor` is not a tensor, or `dtype` is neither floating point nor complex.
        ValueError: `tensor` is fake, but was not constructed by `deferred_init`. Or tensors on `device` have no values.
            Or `dtype` is given, and another tensor shows the same memory in another dtype.
        MaterializationError: A recorded operator cannot be repeated, for example because a real tensor that it reads
            has been changed in place since. `tensor` stays deferred.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"materialize_tensor() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    check_is_dtype(dtype)
    parts = list(parts_of(tensor))
    if is_wrapper(tensor):
        _check_wrappers_stay(parts, device, dtype)
        tensors = _Tensors([], [], parts)
    else:
        tensors = _Tensors(parts, [], [])
    tensors.add(companions([tensor]))
    tensors.materialize(device, dtype, retain_graph)
    return tensor


def materialize_module(
    module: M,
    buffers_only: bool = False,
    check_fn: Callable[[Module], bool] | None = None,
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    retain_graph: bool = False,
    progress: bool = False,
    check_ranks: bool | ProcessGroup = False,
) -> M:
    """Compute the values of all tensors of `module` and its descendants, in place.

    Tied parameters stay tied, and every parameter and buffer stays the same object. Tensors that a module holds as
    plain attributes are materialized also: those in containers, in other objects such as distributions, and in modules
    that are not registered, for example in a list. A module that contains `module`, and that `module` only refers to,
    is not changed. On an error, no tensor is materialized.

    Gradients are materialized with their parameters, and so is the state of optimizers that were given the parameters
    while these were deferred. Pass other optimizers as `optimizer`, and those that keep more than that, such as a
    learning rate that is a tensor.

    With `device` or `dtype` the result equals `module.to(device, dtype)` of the real module. Parameters and buffers
    move; plain attributes stay where they were recorded, unless they share memory with a tensor that moves. Only one
    tensor at a time, with those that share its memory, is in memory twice. The tensors are materialized one by one: an
    error leaves those before it materialized and the others deferred, and another call continues from there.

    Args:
        module: The module to materialize. Its real tensors are not changed or moved.
        buffers_only: Leave the parameters deferred.
        check_fn: Called with each module. If it returns False, the tensors that this module itself holds stay deferred;
            its descendants are decided separately.
        optimizer: One or more optimizers. All of their state is materialized, except the state for parameters that stay
            deferred.
        device: The device of parameters and buffers. Default: their recorded devices.
        dtype: The dtype of floating point and complex parameters and buffers. Default: their recorded dtypes.
        retain_graph: Keep the recording, for `defer_again`. Otherwise it is freed.
        progress: Show a progress bar of bytes and their rate. Needs tqdm.
        check_ranks: Check first that all ranks of the default process group, or of the given group, have recorded the
            same random numbers and constants for tensors of the same names, independent of their shards. All ranks must
            call this. It takes milliseconds.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module, or `dtype` is neither floating point nor complex.
        ValueError, MaterializationError: As for `materialize_tensor`.
        ValueError: `check_ranks` is set, but there is no process group.
        RanksDifferError: `check_ranks` is set, and the ranks differ. All ranks raise this. It names the first tensor
            and, if that was recorded under `tracing()`, the line.
        ImportError: `progress` is set, but tqdm is not installed.
    """
    if not isinstance(module, Module):
        raise TypeError(f"materialize_module() takes a module, but `module` is a {type(module).__name__}.")
    check_is_dtype(dtype)
    if not isinstance(buffers_only, bool):
        raise TypeError(
            "materialize_module() takes `buffers_only`, a bool, as the second positional argument, got "
            f"{type(buffers_only).__name__}. Pass `optimizer=`, `device=` and `dtype=` as keywords."
        )
    optimizers = _optimizers(optimizer) if optimizer else ()
    tensors = _Tensors([], [], [])
    is_whole = not buffers_only and check_fn is None and device is None and dtype is None and check_ranks is False
    # If these are all fakes that exist, custom objects, gradients and optimizers hold no others.
    if is_whole and (fakes := _C.all_fakes_if_in([vars(part) for part in module.modules()])) is not None:
        tensors.others.extend(fakes)
        tensors.materialize(None, None, retain_graph, progress)
        return module
    held = list(held_tensors(module, buffers_only, check_fn))
    tensors.add(held)
    _check_wrappers_stay(tensors.wrapped, device, dtype)
    if check_ranks is not False:
        recording.check_ranks(held, None if check_ranks is True else check_ranks)
    wholes = list({id(part.whole): part.whole for part in held}.values())
    tensors.add(companions(wholes))
    for one in optimizers:
        tensors.add(state_of(one, wholes))
    tensors.materialize(device, dtype, retain_graph, progress)
    return module


def _optimizers(given: Optimizer | Sequence[Optimizer]) -> Sequence[Optimizer]:
    optimizers = [given] if isinstance(given, Optimizer) else given
    for one in optimizers if isinstance(optimizers, Sequence) else [optimizers]:
        if not isinstance(one, Optimizer):
            raise TypeError(f"materialize_module() takes optimizers, but was given a {type(one).__name__}.")
    return optimizers


class _Tensors(NamedTuple):
    """The tensors to materialize: on the requested device, or where they were recorded."""

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
        is_logged = logger.isEnabledFor(logging.INFO)
        total = _count_bytes(self.placed + others) if progress or is_logged else 0
        began = time.perf_counter()
        with progress_bar(total) if progress else nullcontext() as step:
            _C.materialize(self.placed, others, _device(device), dtype, retain_graph, step)
        if is_logged:
            logger.info("Materialized %s in %.3f s.", in_units(total), time.perf_counter() - began)


def defer_again(obj: torch.Tensor | Module) -> None:
    """Drop the values of tensors that were materialized with `retain_graph=True`, and defer them again.

    Their memory is freed. Tensors stay the same objects, with their ties and views. Materializing again computes the
    recorded values, bit for bit, independent of later changes to the materialized tensors. On an error, nothing
    changes. Gradients are not changed.

    Args:
        obj: A tensor, or a module. Deferred tensors are not changed, and neither are plain attributes of a module that
            were not materialized with `retain_graph=True`.

    Raises:
        TypeError: `obj` is neither a tensor nor a module.
        ValueError: No recording was retained for a parameter or a buffer, or it was given other data since (as by
            `module.half()`) or resized.
        MaterializationError: The recorded values cannot be computed any more, because a real tensor that a recorded
            operator reads has been changed in place.
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
            f"{name} of shape {tuple(tensor.shape)} cannot be deferred again, because the recording of its data was "
            "not retained. Materialize with `retain_graph=True`, outside of dry runs, and give it no other data (as "
            "`module.half()` does)."
        )


def _check_wrappers_stay(parts: list[torch.Tensor], device: Device | None, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a part that would move: its wrapper (`DTensor`) would keep the old device and dtype."""
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
    """Return the size of the storages to materialize, in bytes."""
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters raise for their storage
        storages = [tensor.untyped_storage() for tensor in tensors if _C.is_deferred(tensor)]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
