"""Modules that tests construct are deferred, and materialized immediately.

A constructor call is `type.__call__`, which cannot be replaced. It calls the `__init__` of the class, so each module
class gets an `__init__` that defers the original. Nested calls by `super().__init__()` pass through.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn

from torchext.deferred_init import deferred_init, materialize_module

from .callers import is_called_by_tests

__all__ = ["enter", "thread"]


class _Thread(threading.local):
    is_constructing = False
    """Whether a deferred constructor of a module is running."""


thread = _Thread()


def enter(is_control: bool) -> None:
    """Enter the mode."""
    defer = _call if is_control else _defer
    for cls in list(_subclasses(nn.Module)):
        _replace_init(cls, defer)

    def __init_subclass__(cls: type[nn.Module], /, **kwargs: Any) -> None:
        super(nn.Module, cls).__init_subclass__(**kwargs)
        _replace_init(cls, defer)

    nn.Module.__init_subclass__ = classmethod(__init_subclass__)  # type: ignore[assignment]


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _replace_init(cls: type[nn.Module], defer: Callable[..., None]) -> None:
    original: Any = vars(cls).get("__init__")
    if original is None or hasattr(original, "_is_deferred") or issubclass(cls, torch.jit.ScriptModule):
        return

    @wraps(original)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if thread.is_constructing or torch.compiler.is_compiling() or not is_called_by_tests():
            original(self, *args, **kwargs)
            return
        thread.is_constructing = True
        try:
            defer(original, self, *args, **kwargs)
        finally:
            thread.is_constructing = False

    __init__._is_deferred = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[method-assign]


def _call(original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
    original(module, *args, **kwargs)


def _defer(original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
    def construct() -> None:
        original(module, *args, **kwargs)

    deferred_init(construct)
    materialize_module(module)
