"""Deferred initialization: construct a model now, compute its parameters later, with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch.nn import Module, Parameter

from . import _C, _patches

__all__ = ["deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]

P = ParamSpec("P")
T = TypeVar("T")


def deferred_init(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls `fn(*args, **kwargs)` and defers the initialization of the tensors that it constructs.

    They are fake, and all that is done to them is recorded, here and after the call. `materialize_tensor` and
    `materialize_module` make them real, with the values that `fn` would have given them. The random generators are left
    where `fn` would have left them.

    Args:
        fn: Usually a `Module` class, but anything callable will do.
        *args: Positional arguments of `fn`.
        **kwargs: Keyword arguments of `fn`.

    Returns:
        What `fn` returns.

    Example:
        >>> model = deferred_init(torch.nn.Linear, 4, 4)
        >>> model.weight
        Parameter containing:
        tensor(..., size=(4, 4), dtype=torch.float32, device='cpu', requires_grad=True, fake=True)
    """
    _patches.install()
    with _patches.ReadsInTensorFunctions():
        _C.enter_deferred_init()
        try:
            return fn(*args, **kwargs)
        finally:
            _C.leave_deferred_init()


def is_deferred(obj: torch.Tensor | Module) -> bool:
    """Tells whether `obj` waits to be materialized.

    Args:
        obj: A tensor, or a module. A module is deferred while any of the tensors is that `materialize_module` would
            make real.

    Raises:
        TypeError: `obj` is neither.
    """
    if isinstance(obj, torch.Tensor):
        return _C.is_deferred(obj)
    if isinstance(obj, Module):
        return any(_C.is_deferred(tensor) for tensor in _tensors(obj, buffers_only=False, check_fn=None))
    raise TypeError(f"is_deferred() takes a tensor or a module, but `obj` is a {type(obj).__name__}.")


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Makes `tensor` real, in place.

    Whoever holds `tensor`, or a view of it, sees the real values afterwards.

    Args:
        tensor: A deferred tensor. A real one is left as it is.

    Returns:
        `tensor`.

    Raises:
        TypeError: `tensor` is no tensor.
        ValueError: `tensor` is fake, but was not constructed by `deferred_init`.
        RuntimeError: A real tensor that a recorded operator reads has been changed in place since. `tensor` is as it
            was then.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"materialize_tensor() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    _C.materialize([tensor])
    return tensor


def materialize_module(
    module: Module,
    buffers_only: bool = False,
    check_fn: Callable[[Module], bool] | None = None,
) -> None:
    """Makes the tensors of `module` and its descendants real, in place.

    Tied parameters stay tied, and every parameter and buffer stays the object that it is. Tensors that a module holds
    as plain attributes, or in lists and dictionaries among its attributes, are made real too. Either all of them
    become real, or, on an error, none.

    Args:
        module: The module to materialize. What is real already is left as it is.
        buffers_only: Leave the parameters deferred.
        check_fn: Decides for each module, with its descendants asked separately, whether to materialize the tensors
            that it holds itself.

    Raises:
        TypeError: `module` is no module.
        ValueError, RuntimeError: As for `materialize_tensor`.
    """
    if not isinstance(module, Module):
        raise TypeError(f"materialize_module() takes a module, but `module` is a {type(module).__name__}.")
    _C.materialize(list(_tensors(module, buffers_only, check_fn)))


def _tensors(module: Module, buffers_only: bool, check_fn: Callable[[Module], bool] | None) -> Iterator[torch.Tensor]:
    """The tensors that `module` and its descendants hold; one that is held twice may come twice."""
    for part in module.modules():
        if check_fn is None or check_fn(part):
            for tensor in _tensors_in(part.__dict__, seen=set()):
                if not (buffers_only and isinstance(tensor, Parameter)):
                    yield tensor


def _tensors_in(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in the containers that make up `value`. Does not look into other objects, such as child modules."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, set, frozenset)) and id(value) not in seen:
        seen.add(id(value))
        for element in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(element, seen)
