"""Which tensors a module holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import Module, Parameter

__all__ = ["Held", "held_tensors"]


class Held(NamedTuple):
    """A tensor that a module holds."""

    tensor: torch.Tensor
    name: str
    """As `named_parameters()` would call it; of a tensor in a container, the name of the attribute."""
    is_registered: bool
    """Whether it is a parameter or a buffer, which `Module.to()` takes along, or else a plain attribute."""


def held_tensors(
    module: Module, buffers_only: bool = False, check_fn: Callable[[Module], bool] | None = None
) -> Iterator[Held]:
    """Yields the tensors of `module` and its descendants; one that is held twice may come twice.

    Args:
        module: The module.
        buffers_only: Leave out the parameters.
        check_fn: Decides for each module whether to look at what it holds itself.
    """
    for prefix, part in module.named_modules():
        if check_fn is None or check_fn(part):
            for held in _held_by(part, f"{prefix}." if prefix else ""):
                if not (buffers_only and isinstance(held.tensor, Parameter)):
                    yield held


def _held_by(part: Module, prefix: str) -> Iterator[Held]:
    for attribute, value in vars(part).items():
        is_registered = attribute in ("_parameters", "_buffers")
        if is_registered:
            yield from (Held(t, prefix + name, True) for name, t in value.items() if t is not None)
        else:
            yield from (Held(t, prefix + attribute, False) for t in _tensors_in(value, seen=set()))


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in the containers that make up `value`. Does not look into other objects, such as child modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
        seen.add(id(value))
        for element in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(element, seen)
