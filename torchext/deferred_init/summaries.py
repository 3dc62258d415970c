"""A table of what the parts of a module hold, and how long they take to become real."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from .. import _C
from ..tools.held_tensors import Held, held_tensors
from ..tools.sizes import readable
from .timing import TimedOperator, timed_operators

__all__ = ["summary"]

HEADER = ("module", "class", "parameters", "bytes", "of", "state")
OPERATORS = ("operator", "calls", "bytes")
DURATIONS = ("predicted", "measured")
NUMBERS = {"parameters", "calls", "bytes", "of", *DURATIONS}

Row = tuple[str, ...]


def summary(module: Module, *, time: bool | Literal["predicted"] = False) -> str:
    """Returns a table of the modules in `module`, to be printed.

    There is a row for each module that holds tensors itself, with the number of elements of its parameters, the bytes
    of all its tensors (parameters, buffers and plain attributes), and whether they are deferred, real, or fake without
    a record. What several modules share is counted in each of their rows, and once in the total. Of a module that holds
    shards (`DTensor`), these are counted, and there is a column for the bytes of what they are shards of.

    With `time` there are two more columns, and a second table with a row for each operator that materializing runs,
    those that take longest first: the time that it should take and the time that it took. The first is what filling
    that much memory takes on this machine now: by a random fill of the same kind, or with zeros for what is no random
    fill. An operator that takes much longer computes more than it fills. What several storages need is counted for the
    first one that does, and what is done to values while they are being drawn for the fill that draws them. Large
    tensors are filled by `torch.get_num_threads()` threads.

    Args:
        module: A module, deferred or not. It stays as it is.
        time: With true, what is deferred is computed once, to measure it, and not kept: memory holds what the operators
            at hand work on. With "predicted", nothing is computed.

    Raises:
        TypeError: `module` is not a module.
        ValueError: `time` is something else.
        RuntimeError: `time` is true, and materializing would raise this, or would draw from a generator of another
            device.

    Example:
        >>> print(summary(deferred_init(torch.nn.Linear, 4, 4)))
        module  class   parameters  bytes  state
        ------  ------  ----------  -----  --------
        (self)  Linear          20   80 B  deferred
        total                   20   80 B  deferred
    """
    if not isinstance(module, Module):
        raise TypeError(f"summary() takes a module, but `module` is a {type(module).__name__}.")
    if not (isinstance(time, bool) or (isinstance(time, str) and time == "predicted")):
        raise ValueError(f'summary() takes False, True or "predicted" as `time`, but was given {time!r}.')
    held = _held_by_part(module)
    if not time:
        return _without_empty_columns(HEADER, [(*names, *_figures(tensors)) for names, tensors in held])
    tensors = [item.tensor for _, items in held for item in items]
    operators = timed_operators(tensors, measured=time is True)
    modules = [(*names, *_figures(items), *_durations(_needed_by(items, operators))) for names, items in held]
    tables = [_without_empty_columns(HEADER + DURATIONS, modules)]
    if operators:
        tables.append(_table(OPERATORS + DURATIONS, _by_name(operators)))
    return "\n\n".join(tables)


def _held_by_part(module: Module) -> list[tuple[tuple[str, str], list[Held]]]:
    """The name and the class of each module that holds tensors itself, with these, and all of them in the end."""
    parts = []
    everything: list[Held] = []
    for name, part in module.named_modules():
        if held := list(held_tensors(part, check_fn=partial(operator.is_, part))):
            parts.append(((name or "(self)", type(part).__name__), held))
            everything += held
    return [*parts, (("total", ""), everything)]


def _figures(held: Sequence[Held]) -> tuple[str, str, str, str]:
    """The columns that are counted: parameters, bytes, those of the whole if they are shards, and state."""
    tensors = list({id(item.tensor): item.tensor for item in held}.values())
    parameters = {id(item.tensor): item.tensor for item in held if item.is_parameter}
    elements = sum(t.numel() for t in parameters.values() if not is_lazy(t))
    # By storage: views show bytes that their base has too.
    storages = dict(map(_storage, tensors))
    states = sorted({_state(t) for t in tensors})
    nbytes = sum(storages.values())
    return f"{elements:,}", readable(nbytes), _size_of_whole(held, nbytes), ", ".join(states)


def _size_of_whole(held: Sequence[Held], nbytes: int) -> str:
    parts = {id(item.tensor): item for item in held if item.is_part}.values()
    if not parts:
        return ""
    wholes = {id(item.whole): item.whole for item in parts}.values()
    own = dict(_storage(item.tensor) for item in parts)
    return readable(nbytes - sum(own.values()) + sum(whole.numel() * whole.element_size() for whole in wholes))


def _without_empty_columns(header: Row, rows: Sequence[Row]) -> str:
    """A table without the columns of shards if there are none."""
    kept = [i for i, name in enumerate(header) if name != "of" or any(row[i] for row in rows)]
    return _table(tuple(header[i] for i in kept), [tuple(row[i] for i in kept) for row in rows])


def _needed_by(held: Iterable[Held], operators: Iterable[TimedOperator]) -> list[TimedOperator]:
    storages = {_storage(item.tensor)[0] for item in held}
    return [operator for operator in operators if operator.storage in storages]


def _by_name(operators: Iterable[TimedOperator]) -> Iterator[Row]:
    """The rows of the operators, those that take longest first."""
    calls: dict[str, list[TimedOperator]] = {}
    for one in operators:
        calls.setdefault(one.name, []).append(one)

    def duration(of: Sequence[TimedOperator]) -> float:
        return sum(one.predicted if one.measured is None else one.measured for one in of)

    for name, same in sorted(calls.items(), key=lambda item: -duration(item[1])):
        yield name, f"{len(same):,}", readable(sum(one.nbytes for one in same)), *_durations(same)


def _durations(operators: Sequence[TimedOperator]) -> tuple[str, str]:
    """The time predicted for them and measured. Either all have been measured, or none."""
    if not operators:
        return "", ""
    measured = [one.measured for one in operators if one.measured is not None]
    return _milliseconds(sum(one.predicted for one in operators)), _milliseconds(sum(measured)) if measured else ""


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def _table(header: Row, rows: Iterable[Row]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, tuple("-" * width for width in widths))
    return "\n".join(_line(header, line, widths) for line in lines)


def _line(header: Row, row: Row, widths: list[int]) -> str:
    cells = (
        cell.rjust(width) if name in NUMBERS else cell.ljust(width)
        for name, cell, width in zip(header, row, widths, strict=True)
    )
    return "  ".join(cells).rstrip()


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """Which storage `tensor` shows, and how many bytes that has."""
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters refuse to show theirs
        if not torch._C._has_storage(tensor):  # sparse ones have several
            return id(tensor), tensor.numel() * tensor.element_size()
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes()


def _state(tensor: torch.Tensor) -> str:
    if _C.is_deferred(tensor):
        return "deferred"
    return "fake" if _C.is_fake(tensor) else "real"
