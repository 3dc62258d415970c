"""Detect the beginnings of forward and backward passes.

A forward pass is a call of a module that holds parameters or buffers, while no other module runs on the thread. Losses
and metrics, which are modules without either, belong to the code around them. A backward pass is a run of autograd's
engine. Code inside a backward pass belongs to it: activation checkpointing calls modules and the engine again, and
gradient hooks may call optimizers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..internals.patching import Function
from .current import while_world_is_open

__all__ = ["Passes", "is_in_backward"]

_listeners: list[Callable[[], None]] = []


def is_in_backward() -> bool:
    """Return true if this thread runs in a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Passes:
    """Detects passes of the process, on all threads.

    Args:
        on_forward: Called before each forward pass begins.
        on_backward: Called before each backward pass begins.
    """

    def __init__(self, on_forward: Callable[[], None], on_backward: Callable[[], None]) -> None:
        self._on_forward = on_forward
        self._on_backward = on_backward
        self._process = os.getpid()
        self._running = _Running()
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        _listeners.append(self._begin_backward)

    def is_in_pass(self) -> bool:
        """Return true if this thread runs in a pass."""
        return self._running.count > 0 or is_in_backward()

    def close(self) -> None:
        """Stop detecting passes."""
        for handle in self._handles:
            handle.remove()
        _listeners.remove(self._begin_backward)

    def _enter(self, module: nn.Module, args: Any) -> None:
        is_outermost = self._running.count == 0
        self._running.count += 1
        if is_outermost and not is_in_backward() and _computes(module) and os.getpid() == self._process:
            self._on_forward()

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.count = max(self._running.count - 1, 0)

    def _begin_backward(self) -> None:
        if os.getpid() == self._process:
            self._on_backward()


class _Running(threading.local):
    """The number of modules that run on the thread."""

    count = 0


def _computes(module: nn.Module) -> bool:
    # `torch.nn.DataParallel` runs replicas on its own threads.
    if getattr(module, "_is_replica", False):
        return False
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


@while_world_is_open.replaces(
    torch.autograd.graph, "_engine_run_backward", reason="has no hook for the beginning of a backward pass"
)
def _engine_run_backward(original: Function, /, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_in_backward():
        for listener in list(_listeners):
            listener()
    return original(outputs, *args, **kwargs)
