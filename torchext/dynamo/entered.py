"""What graphs enter when they run, and leaving it after an error.

A graph enters and leaves a guard by two of its operators. Backends that call these one after the other do not call the
second if one between them raises an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .. import _C

__all__ = ["Guard", "enter", "leave", "left_after_errors"]

Guard = _C.InferenceBlock | _C.NormalTensorsBlock | _C.AutocastRegion
Compiled = Callable[..., Any]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.guards: list[Guard] = []


_entered = _Thread()


def enter(guard: Guard) -> Guard:
    """Enters a guard of ours, in a graph."""
    guard.__enter__()
    _entered.guards.append(guard)
    return guard


def leave(guard: Guard) -> None:
    """Leaves it, in a graph."""
    _entered.guards.remove(guard)
    guard.__exit__(None, None, None)


def left_after_errors(compiled: Compiled) -> Compiled:
    """Returns what calls `compiled`, and puts the state of the thread back if that raises an error.

    Called in the state in which the code is called: it is compiled for no other.
    """
    if hasattr(compiled, "serialize_compile_artifacts"):
        return compiled  # what is stored is compiled by AOTAutograd, and enters nothing
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
    """How many regions are open, PyTorch's included."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _state_here() -> list[Callable[[], object]]:
    """What a graph changes by operators of PyTorch's."""
    steps: list[Callable[[], object]] = [
        partial(torch._C._set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
    ]
    for device_type in {"cpu", _C.autocast_device_type_in_use()}:
        steps.append(partial(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type)))
        steps.append(partial(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type)))
    return steps
