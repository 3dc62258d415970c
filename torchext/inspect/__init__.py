"""The route of a call through the dispatcher, the state of a tensor, and the patches of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from .. import _C
from ..tools.leases import leases
from ..tools.results import Column, Items, Table, plain
from .walk import Walk

__all__ = ["PatchState", "Route", "RouteStep", "TensorState", "patches", "route", "tensor_state"]


@dataclass(frozen=True)
class RouteStep:
    """A dispatch key that a call visits, and the effect of the key on the call."""

    key: str
    """The key, such as `AutogradCPU`. `Undefined` if no key is left for the call."""
    origin: str
    """The key that the kernel was registered for: the same, or an alias key such as `CompositeImplicitAutograd`.
    `fallback` for the kernel that serves all operators, `none` without a kernel."""
    turn: str
    """*skipped*: the key falls through, no kernel runs. *passes on*: the kernel redispatches the call to the keys
    below. *starts over*: it makes the call again, without its key. *decomposes*: it calls other operators, each with
    its own route. *computes*: it makes the results. *calls Python*: it passes the call to a mode or a subclass.
    *raises*: the key has no kernel, or a fallback of torchext raises an error."""
    is_python: bool
    """Whether the kernel is written in Python."""
    source: str
    """The `file:line` that registered the kernel."""
    comment: str
    """A special property of this kernel or this call, the message of the error that is raised, or nothing."""

    @property
    def is_fallthrough(self) -> bool:
        """Whether no kernel runs, because all calls of the operator skip this key."""
        return self.turn == "skipped"

    @property
    def runs(self) -> bool:
        """Whether the key has a kernel, and the kernel runs."""
        return self.turn != "skipped" and self.origin != "none"


class Route(Items[RouteStep]):
    """The dispatch keys that a call visits, in order. Prints as a table."""

    def __init__(self, operator: str, steps: Sequence[RouteStep]) -> None:
        super().__init__(steps)
        self._operator = operator

    @property
    def operator(self) -> str:
        """The overload that is called, such as `aten::add.Tensor`."""
        return self._operator

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys whose kernels run."""
        return tuple(step.key for step in self._items if step.runs)

    def __str__(self) -> str:
        return "\n".join([self._operator, *_table([_row(step) for step in self._items])])

    def _repr_html_(self) -> str:
        columns = list(map(Column, (self._operator, "kernel", "turn", "comment")))
        return Table(columns, map(_row, self._items))._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return the operator and the steps as plain values."""
        return {"operator": self._operator, "steps": plain(self._items)}


def _row(step: RouteStep) -> tuple[str, ...]:
    kernel = {step.key: "kernel", "fallback": "fallback", "none": "no kernel"}.get(step.origin, step.origin)
    if step.is_python:
        kernel += " (Python)"
    return step.key, kernel, step.turn, step.comment or PurePath(step.source).name


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def route(
    op: OpOverload[..., Any] | OpOverloadPacket[..., Any] | CustomOpDef | str, /, *args: Any, **kwargs: Any
) -> Route:
    """Return the dispatch keys that the call `op(*args, **kwargs)` would visit on this thread now. Runs no operator.

    Args:
        op: The overload to call (`torch.ops.aten.add.Tensor`), an operator whose overload PyTorch chooses by the
            arguments (`torch.ops.aten.add`), or the name of either (`"aten::add.Tensor"`).
        *args: The positional arguments of the call.
        **kwargs: The keyword arguments of the call.

    Returns:
        The steps of the call, from the first key that the dispatcher finds to the kernel that computes, or to code
        whose behavior cannot be predicted.

    Raises:
        TypeError: `op` is of another type, or the arguments do not match its schema.
        ValueError: No operator has that name.

    Example:
        >>> print(route(torch.ops.aten.add_.Tensor, torch.ones(2), 1))
        aten::add_.Tensor
          AutogradCPU      Autograd  passes on  VariableType_8.cpp:9410
          ADInplaceOrView  kernel    passes on  ADInplaceOrViewType_0.cpp:5032
          BackendSelect    fallback  skipped    BackendSelectFallbackKernel.cpp:3
          CPU              kernel    computes   RegisterCPU_0.cpp:1297
    """
    name, overload_name = _resolve(op, args, kwargs)
    operator = f"{name}.{overload_name}" if overload_name else name
    try:
        call = _C.PredictedCall(name, overload_name, args, kwargs)
    except TypeError as error:
        raise TypeError(f"route() was given arguments that `{operator}` does not take: {error}") from None
    return Route(operator, [RouteStep(*step) for step in Walk(operator, call).steps()])


def _resolve(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str]:
    """Return the name and the overload of the operator that a call of `op` calls."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return op._schema.name, op._schema.overload_name
    if isinstance(op, OpOverloadPacket):
        return op._qualified_op_name, _resolve_overload(op._qualified_op_name, args, kwargs)
    if not isinstance(op, str):
        raise TypeError(
            f"route() takes an operator of the dispatcher, such as torch.ops.aten.add, torch.ops.aten.add.Tensor or "
            f'"aten::add.Tensor", but `op` is {op!r}. A TorchDispatchMode shows which operators a function calls.'
        )
    name, _, overload_name = op.partition(".")
    if "::" not in name:
        raise ValueError(f'route() takes names such as "aten::add.Tensor", with a namespace, but `op` is "{op}".')
    if overload_name == "default":
        return name, ""
    return name, overload_name or _resolve_overload(name, args, kwargs)


def _resolve_overload(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    schemas = torch._C._jit_get_schemas_for_operator(name)
    if not schemas:
        raise ValueError(f"The dispatcher has no operator `{name}`.")
    try:
        overload_name: str = torch._C._jit_resolve_packet(name, *args, **kwargs)
    except RuntimeError:
        overloads = "".join(f"\n  {schema}" for schema in schemas if _C.has_operator(name, schema.overload_name))
        raise TypeError(f"route() was given arguments that no overload of `{name}` takes:{overloads}") from None
    return "" if overload_name == "default" else overload_name


@dataclass(frozen=True)
class TensorState:
    """The state of a tensor for the dispatcher and autograd, without its shape and values. Prints as a table."""

    keys: tuple[str, ...]
    """The dispatch keys, in the order in which a call visits them. They include the autocast key of the
    device, such as `AutocastCPU`, which the thread excludes outside of autocast regions."""
    version: int | None
    """The number of writes to its memory. None for an inference tensor, which has no version counter."""
    has_autograd_metadata: bool
    """Whether autograd has allocated metadata for it: after it requires a gradient, or gets a `grad_fn`, a `grad`,
    hooks or a name, and for views."""
    storage: int | None
    """A number that tensors on the same storage share. Different storages that are alive have different numbers. It is
    not a data pointer. None for tensors without a storage, such as sparse ones."""
    fake: bool
    deferred: bool
    inference: bool
    requires_grad: bool
    is_leaf: bool
    is_view: bool
    creation_metadata: str | None
    """For a view that autograd tracks, how it was created, by the name in the PyTorch enum `CreationMeta`:
    `DEFAULT`, `NO_GRAD_MODE`, `INFERENCE_MODE`, `MULTI_OUTPUT_NODE`, `IN_CUSTOM_FUNCTION`. All but the first restrict
    writing in place. None for other tensors."""

    def _rows(self) -> list[tuple[str, str]]:
        return [(field.name, _cell(getattr(self, field.name))) for field in fields(self)]

    def __str__(self) -> str:
        return "\n".join(["tensor state", *_table(self._rows())])

    def _repr_html_(self) -> str:
        return Table([Column("tensor state"), Column("")], self._rows())._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def tensor_state(tensor: torch.Tensor) -> TensorState:
    """Return the state of `tensor` for the dispatcher and autograd. Calls no operator, and changes nothing.

    Args:
        tensor: Any tensor: real, fake, deferred, sparse, of a subclass, or wrapped by a transform of `torch.func`. For
            a wrapper, the result is its own state, not that of the wrapped tensor.

    Raises:
        TypeError: `tensor` is not a tensor.

    Example:
        >>> state = tensor_state(torch.ones(2))
        >>> state.keys, state.version, state.has_autograd_metadata
        (('AutocastCPU', 'AutogradCPU', 'ADInplaceOrView', 'CPU'), 0, False)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor_state() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    state = _C.autograd_state(tensor)
    return TensorState(
        keys=tuple(_keys_of(tensor)),
        storage=_storage_of(tensor),
        fake=_C.is_fake(tensor),
        deferred=_C.is_deferred(tensor),
        creation_metadata=torch._C._autograd._get_creation_meta(tensor).name if state["is_view"] else None,
        **state,
    )


def _keys_of(tensor: torch.Tensor) -> Iterator[str]:
    keys = torch._C._dispatch_keys(tensor)
    while (key := keys.highestPriorityTypeId()) != torch._C.DispatchKey.Undefined:
        yield torch._C._dispatch_key_name(key)
        keys = keys.remove(key)


def _storage_of(tensor: torch.Tensor) -> int | None:
    try:
        number: int = torch._C._storage_id(tensor)  # type: ignore[attr-defined]  # missing in the stub
        return number
    except NotImplementedError:  # of a sparse tensor, or of a wrapper such as those of torch.func
        return None


@dataclass(frozen=True)
class PatchState:
    """A function or attribute of PyTorch that torchext replaces."""

    target: str
    """Its name, such as `torch.nn.init.trunc_normal_`."""
    reason: str
    """The behavior of PyTorch that requires the patch."""
    needed_while: str
    """The condition under which it is replaced. Otherwise the original is in place."""
    releases: str
    """The releases of PyTorch that need the patch."""
    is_installed: bool
    """Whether it is replaced now."""
    function: object
    """The function, if only its code is replaced; None if another object takes its place."""


def patches() -> tuple[PatchState, ...]:
    """Return everything that torchext replaces in PyTorch, now or at other times.

    Example:
        >>> [patch.target for patch in patches() if patch.is_installed]
        []
    """
    return tuple(
        PatchState(patch.target, patch.reason, lease.needed_while, patch.releases, patch.is_installed, patch.function)
        for lease in leases
        for patch in lease.declared()
    )
