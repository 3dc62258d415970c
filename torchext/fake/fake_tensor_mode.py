"""Combines our fake mode with PyTorch's `FakeTensorMode` on one thread: the innermost applies.

Without this, `FakeTensorMode` would call Meta kernels whose factories our mode makes fake, and its tensors would be
both.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import proxy_tensor

from .. import _C
from ..internals.leases import while_fakes_live
from ..internals.patching import Concerns, Function

__all__ = ["fakes_on_this_thread"]


class _Thread(threading.local):
    def __init__(self) -> None:
        # Number of times our mode has been entered since the last FakeTensorMode.
        self.depth = 0
        # The value of `depth` when each FakeTensorMode was entered.
        self.suspended: list[int] = []


_thread = _Thread()


@contextmanager
def fakes_on_this_thread() -> Iterator[None]:
    """Enter our fake mode and leave any `FakeTensorMode` in the block."""
    with unset_fake_temporarily():
        _enter(1)
        try:
            yield
        finally:
            _leave(1)


def _enter(times: int) -> None:
    for _ in range(times):
        _C.enter_fake_mode()
    _thread.depth += times


def _leave(times: int) -> None:
    for _ in range(times):
        _C.leave_fake_mode()
    _thread.depth -= times


def _suspend() -> None:
    while_fakes_live.acquire()  # keeps the patches until the end of the block
    _thread.suspended.append(_thread.depth)
    _leave(_thread.depth)


def _resume() -> None:
    if _thread.suspended:  # else it was entered before the process's first fake mode
        _enter(_thread.suspended.pop())
        while_fakes_live.release()


# ---- Our mode is suspended in the blocks of `FakeTensorMode`, and where it converts tensors


MAKES_FAKES = "calls Meta kernels whose factories our mode makes fake"


@while_fakes_live.replaces(FakeTensorMode, "__enter__", reason=MAKES_FAKES)
def _enter_mode(original: Function, self: FakeTensorMode) -> Any:
    entered = original(self)
    _suspend()
    return entered


@while_fakes_live.replaces(FakeTensorMode, "__exit__", reason=MAKES_FAKES)
def _exit_mode(original: Function, self: FakeTensorMode, *error: Any) -> None:
    _resume()
    original(self, *error)


@while_fakes_live.replaces(FakeTensorMode, "from_tensor", reason=MAKES_FAKES)
def _from_tensor(original: Function, /, self: FakeTensorMode, *args: Any, **kwargs: Any) -> Any:
    _suspend()
    try:
        return original(self, *args, **kwargs)
    finally:
        _resume()


# ---- Checks for FakeTensors


@while_fakes_live.replaces(fake_tensor, "_is_plain_tensor", reason="decides if item() works", concerns=Concerns.FAKES)
def _is_plain_tensor(original: Function, t: object) -> Any:
    """Dynamo reads integer inputs without dimensions, such as the counter of `torch.nn.BatchNorm1d`."""
    has_value = not (isinstance(t, torch.Tensor) and _C.is_fake(t)) or _C.is_deferred(t)
    return has_value and original(t)


if hasattr(torch._C, "_is_fake_tensor"):

    @while_fakes_live.replaces(
        proxy_tensor, "snapshot_fake", reason="assumes that the Fake key marks PyTorch's FakeTensors"
    )
    def _snapshot_fake(original: Function, /, val: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Since 2.14 `make_fx()` assumes this."""
        if isinstance(val, FakeTensor) or not _C.is_fake(val):
            return original(val, *args, **kwargs)
        return val.detach()
