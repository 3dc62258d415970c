"""Guards that graphs enter when they run, and cleanup after an error.

A graph enters and leaves a guard by two of its operators. Backends that call operators one by one skip the second if
one in between raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import _C

__all__ = ["Guard", "enter", "leave", "restoring_state"]

Guard = _C.InferenceBlock | _C.NormalTensorsBlock | _C.AutocastRegion
Compiled = Callable[..., Any]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.guards: list[Guard] = []


_entered = _Thread()


def enter(guard: Guard) -> Guard:
    """Enter one of our guards, in a graph."""
    guard.__enter__()
    _entered.guards.append(guard)
    return guard


def leave(guard: Guard) -> None:
    """Leave the guard, in a graph."""
    _entered.guards.remove(guard)
    guard.__exit__(None, None, None)


def restoring_state(compiled: Compiled) -> Compiled:
    """Return a function that calls `compiled` and restores the thread's state if that raises an error.

    Must be called in the state in which the code runs: the code is compiled for this state only.
    """
    if hasattr(compiled, "serialize_compile_artifacts"):
        return compiled  # AOTAutograd compiles stored code, which enters nothing
    restore = _state_here()

    def run(*args: Any) -> Any:
        depth, count = _nesting(), len(_entered.guards)
        try:
            return compiled(*args)
        except BaseException:
            while len(_entered.guards) > count:
                _entered.guards.pop().__exit__(None, None, None)
            while _nesting() > depth:
                torch.autocast_decrement_nesting()
            for step in restore:
                step()
            raise

    return run


def _nesting() -> int:
    """Return the number of open regions, including PyTorch's."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _state_here() -> list[Callable[[], object]]:
    """Return the state that graphs change by PyTorch operators."""
    steps: list[Callable[[], object]] = [
        partial(torch._C._set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
    ]
    for device_type in {"cpu", _C.autocast_device_type_in_use()}:
        steps.append(partial(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type)))
        steps.append(partial(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type)))
    return steps
