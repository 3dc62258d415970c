"""Events of the program: forward passes of modules, backward passes, and steps of optimizers begin and end."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .. import _C
from .leases import Lease
from .patching import Function

__all__ = [
    "GENERATED",
    "Listener",
    "is_in_backward",
    "is_observing",
    "is_users",
    "place_of",
    "subscribe",
    "tracing",
    "unobserved",
    "users_frame",
]


class Listener:
    """Receives events of all threads. Only the methods that a subclass overrides are registered.

    An error of a method is raised where the event occurs. A module whose forward pass raises a `BaseException` that is
    not an `Exception` does not end.
    """

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Handle the beginning of a forward pass of any module."""

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Handle the end of a forward pass of any module, also by an error."""

    def begin_backward(self) -> None:
        """Handle the beginning of a backward pass, but for those within a backward pass."""

    def begin_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Handle the beginning of a step of any optimizer."""

    def end_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Handle the end of a step of any optimizer that has raised no error."""

    def end_construction(self, optimizer: Optimizer) -> None:
        """Handle the end of the constructor of any optimizer."""


def subscribe(listener: Listener) -> ExitStack:
    """Send events to `listener` until the returned stack is closed."""
    subscription = ExitStack()
    for name, register in SOURCES.items():
        if getattr(type(listener), name) is not getattr(Listener, name):
            subscription.callback(register(getattr(listener, name)))
    return subscription


def is_observing() -> bool:
    """Return true if hooks of listeners are on modules."""
    return bool(_handles)


@contextmanager
def unobserved() -> Iterator[None]:
    """Take the hooks of all listeners away from modules in the block, on all threads."""
    ours = {handle.id for handle in _handles}
    hidden = [(hooks, dict(hooks)) for hooks in _hooks_of_modules() if not ours.isdisjoint(hooks)]
    for hooks, before in hidden:
        for number in ours.intersection(before):
            del hooks[number]
    try:
        yield
    finally:
        for hooks, before in hidden:
            hooks.update(before)


def _hooks_of_modules() -> Iterator[dict[int, Any]]:
    for name in ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called"):
        yield getattr(torch.nn.modules.module, name)


def is_in_backward() -> bool:
    """Return true if this thread runs in a backward pass."""
    return torch._C._current_graph_task_id() != -1


# ---- Events for which PyTorch has no hooks


_while_observed = Lease("a dry run counts steps or passes")
_on_backward: list[Callable[[], None]] = []
_on_construction: list[Callable[[Optimizer], None]] = []


@_while_observed.replaces(
    torch.autograd.graph, "_engine_run_backward", reason="has no hook for the beginning of a backward pass"
)
def _engine_run_backward(original: Function, /, outputs: Any, *args: Any, **kwargs: Any) -> Any:
    if not is_in_backward() and torch._guards.TracingContext.try_get() is None:  # a compiler differentiates graphs
        for listener in list(_on_backward):
            listener()
    return original(outputs, *args, **kwargs)


@_while_observed.replaces(Optimizer, "__init__", reason="has no hook for new optimizers")
def _init(original: Function, /, self: Optimizer, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for listener in list(_on_construction):
        listener(self)


# ---- Where each event comes from: functions that register a method, and return a function that removes it


_handles: list[RemovableHandle] = []


def _hooks(register: Callable[..., RemovableHandle], **options: Any) -> Callable[[Any], Callable[[], None]]:
    def listen(method: Any) -> Callable[[], None]:
        handle = register(method, **options)
        _handles.append(handle)
        return partial(_remove, handle)

    return listen


def _remove(handle: RemovableHandle) -> None:
    _handles.remove(handle)
    handle.remove()


def _register(methods: list[Any], method: Any) -> Callable[[], None]:
    registration = ExitStack()
    registration.enter_context(_while_observed.hold())
    methods.append(method)
    registration.callback(methods.remove, method)
    return registration.close


SOURCES: dict[str, Callable[[Any], Callable[[], None]]] = {
    "enter_module": _hooks(register_module_forward_pre_hook),
    "leave_module": _hooks(register_module_forward_hook, always_call=True),
    "begin_backward": partial(_register, _on_backward),
    "begin_step": _hooks(register_optimizer_step_pre_hook),
    "end_step": _hooks(register_optimizer_step_post_hook),
    "end_construction": partial(_register, _on_construction),
}


# ---- Finds the line of the user's program that records an operator


GENERATED = str(Path(tempfile.gettempdir(), "torchext_compiled_"))
"""The first part of the names of folders of code that the compiler generates in a run with fakes."""

# A line in a model's constructor is more useful than the line in `torch/nn/modules/linear.py` that it leads to, or a
# line that torch.fx has generated.
_NOT_THE_USERS = (
    *(str(Path(file).parent) + os.sep for file in (torch.__file__, _C.__file__)),
    "<eval_with_key>",
    GENERATED,
)


@contextmanager
def tracing() -> Iterator[None]:
    """Record each operator on this thread together with the line of the program that caused it.

    That is the innermost line outside of PyTorch and torchext. `explain()` and errors about a recorded operator show
    it. Recording is several times slower in the block. `deferred_init(..., trace=True)` does the same for one call.

    Example:
        >>> with tracing():
        ...     model = deferred_init(torch.nn.Linear, 4, 4)
        >>> explain(model.bias)[0].source
        '...:2 in <module>'
    """
    _C.enter_tracing()
    try:
        yield
    finally:
        _C.leave_tracing()


def users_frame() -> FrameType | None:
    """Return the innermost frame outside of PyTorch and torchext, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_users(file: str) -> bool:
    """Return true unless a file belongs to PyTorch or torchext, or is generated."""
    return not file.startswith(_NOT_THE_USERS)


def place_of(frame: FrameType | None) -> str:
    """Return the line of a frame as `file:line in function`, or an empty string if there is no frame."""
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _current_line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(GENERATED) and (line := _line_of_generated(frame)):
            return line
        frame = frame.f_back
    return place_of(frame)


def _line_of_generated(frame: FrameType) -> str:
    """Return the line of the program from which the compiler has generated the line of a frame, if it is known."""
    cache = sys.modules["torch._inductor.codecache"].PyCodeCache
    frames = cache.stack_frames_for_code(frame.f_code.co_filename, frame.f_lineno) or ()
    return next((f"{f['filename']}:{f['line']} in {f['name']}" for f in frames if is_users(f["filename"])), "")


_C.provide("current_line", _current_line)
