"""Tensors from factory functions in tests are deferred and materialized immediately, and so are modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.utils._device import _device_constructors

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor

from . import deferred
from .callers import is_called_by_tests
from .replacing import replace_everywhere

__all__ = ["enter"]


def enter(is_control: bool) -> None:
    """Enter the mode."""
    deferred.enter(is_control)
    for factory in _factories():
        replace_everywhere(factory, _replacement(factory, _call if is_control else _defer))


def _factories() -> Iterator[Callable[..., Any]]:
    """Return PyTorch's factory functions, including those that make a tensor like another."""
    yield from _device_constructors()
    for name in dir(torch):
        if name.endswith("_like"):
            yield getattr(torch, name)


def _replacement(factory: Callable[..., Any], defer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if deferred.thread.is_constructing or torch.compiler.is_compiling() or not is_called_by_tests():
            return factory(*args, **kwargs)
        return defer(factory, *args, **kwargs)

    operator = torch.jit._builtins._find_builtin(factory)
    if operator is not None:  # prevents TorchScript from compiling `make`
        torch.jit._builtins._register_builtin(make, operator)
    return make


def _call(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return factory(*args, **kwargs)


def _defer(factory: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = deferred_init(lambda: factory(*args, **kwargs))
    if isinstance(result, torch.Tensor) and is_deferred(result):
        materialize_tensor(result)
    return result
