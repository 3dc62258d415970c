"""A table of what the parts of a module hold."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from .. import _C
from ..tools.held_tensors import Held, held_tensors

__all__ = ["summary"]

HEADER = ("module", "class", "parameters", "bytes", "state")


def summary(module: Module) -> str:
    """Returns a table of the modules in `module`, to be printed.

    There is a row for each module that holds tensors itself, with the number of elements of its parameters, the bytes
    of all its tensors (parameters, buffers and plain attributes), and whether they are deferred, real, or fake without
    a record. What several modules share is counted in each of their rows, and once in the total.

    Args:
        module: A module, deferred or not. It stays as it is.

    Raises:
        TypeError: `module` is not a module.

    Example:
        >>> print(summary(deferred_init(torch.nn.Linear, 4, 4)))
        module  class   parameters  bytes  state
        ------  ------  ----------  -----  --------
        (self)  Linear          20   80 B  deferred
        total                   20   80 B  deferred
    """
    if not isinstance(module, Module):
        raise TypeError(f"summary() takes a module, but `module` is a {type(module).__name__}.")
    rows = [HEADER, *_rows(module)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    is_number = (False, False, True, True, False)
    cells = (
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(row, widths, is_number, strict=True)
    )
    return "  ".join(cells).rstrip()


def _rows(module: Module) -> Iterator[tuple[str, ...]]:
    everything: list[Held] = []
    for name, part in module.named_modules():
        held = list(held_tensors(part, check_fn=partial(operator.is_, part)))
        everything += held
        if held:
            yield (name or "(self)", type(part).__name__, *_figures(held))
    yield ("total", "", *_figures(everything))


def _figures(held: Iterable[Held]) -> tuple[str, str, str]:
    """The columns that are counted: parameters, bytes and state."""
    tensors = list({id(item.tensor): item.tensor for item in held}.values())
    parameters = {id(item.tensor): item.tensor for item in held if item.is_parameter}
    elements = sum(t.numel() for t in parameters.values() if not is_lazy(t))
    # By storage: views show bytes that their base has too.
    storages = dict(map(_storage, tensors))
    states = sorted({_state(t) for t in tensors})
    return f"{elements:,}", _readable(sum(storages.values())), ", ".join(states)


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


def _readable(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
