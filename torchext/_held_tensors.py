"""Which tensors a module holds, and which a tensor is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

__all__ = ["Held", "held_tensors", "is_wrapper", "parts_of", "tensors_in"]


class Held(NamedTuple):
    """A tensor that a module holds."""

    tensor: torch.Tensor
    """It itself, or a part of a wrapper such as a `DTensor`, which has no data of its own."""
    name: str
    """As `named_parameters()` would call it; of a tensor in a container, the name of the attribute."""
    is_registered: bool
    """Whether it is a parameter or a buffer, which `Module.to()` takes along, or else a plain attribute."""
    is_parameter: bool
    is_part: bool
    """Whether it is a part of a wrapper."""


def held_tensors(
    module: Module, buffers_only: bool = False, check_fn: Callable[[Module], bool] | None = None
) -> Iterator[Held]:
    """Yields the tensors of `module` and its descendants; one that is held twice may come twice.

    Args:
        module: The module.
        buffers_only: Leave out the parameters.
        check_fn: Decides for each module whether to look at what it holds itself.
    """
    for prefix, module_part in module.named_modules():
        if check_fn is None or check_fn(module_part):
            for tensor, name, is_registered in _held_by(module_part):
                is_parameter = isinstance(tensor, Parameter)
                if not (buffers_only and is_parameter):
                    full_name = f"{prefix}.{name}" if prefix else name
                    for part in parts_of(tensor):
                        yield Held(part, full_name, is_registered, is_parameter, part is not tensor)


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the tensors with data that `tensor` is made of: itself, unless it is a wrapper of others."""
    if is_wrapper(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # some of what `DTensor` names is not
                yield from parts_of(part)
    else:
        yield tensor


def _held_by(module: Module) -> Iterator[tuple[torch.Tensor, str, bool]]:
    for attribute, value in vars(module).items():
        if attribute in ("_parameters", "_buffers"):
            yield from ((tensor, name, True) for name, tensor in value.items() if tensor is not None)
        else:
            yield from ((tensor, attribute, False) for tensor in tensors_in(value, seen=set()))


def tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """Yields the tensors in the containers that make up `value`, not those of other objects, such as child modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
        seen.add(id(value))
        for element in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(element, seen)
