"""Our fake mode and PyTorch's `FakeTensorMode` on one thread: the one that was entered last decides.

Left alone, `FakeTensorMode` would call Meta kernels whose factories our mode makes fake, and its tensors would be both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.fx.experimental.proxy_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from . import _C

__all__ = ["fakes_on_this_thread", "install"]


class _Thread(threading.local):
    def __init__(self) -> None:
        # How often our mode has been entered since the last FakeTensorMode.
        self.depth = 0
        # What `depth` was when each FakeTensorMode was entered.
        self.suspended: list[int] = []


_thread = _Thread()


@contextmanager
def fakes_on_this_thread() -> Iterator[None]:
    """Is in our fake mode, and in no `FakeTensorMode`."""
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
    _thread.suspended.append(_thread.depth)
    _leave(_thread.depth)


def _resume() -> None:
    if _thread.suspended:  # else it was entered before the first fake mode of the process
        _enter(_thread.suspended.pop())


def install() -> None:
    """Suspends our mode in the blocks of `FakeTensorMode`, and where it converts tensors."""
    enter: Callable[..., FakeTensorMode] = FakeTensorMode.__enter__
    leave: Callable[..., None] = FakeTensorMode.__exit__
    convert: Callable[..., FakeTensor] = FakeTensorMode.from_tensor

    @wraps(enter)
    def __enter__(self: FakeTensorMode) -> FakeTensorMode:
        entered = enter(self)
        _suspend()
        return entered

    @wraps(leave)
    def __exit__(self: FakeTensorMode, *error: Any) -> None:
        _resume()
        leave(self, *error)

    @wraps(convert)
    def from_tensor(self: FakeTensorMode, *args: Any, **kwargs: Any) -> FakeTensor:
        _suspend()
        try:
            return convert(self, *args, **kwargs)
        finally:
            _resume()

    if hasattr(torch._C, "_is_fake_tensor"):
        _patch_tracing()
    FakeTensorMode.__enter__ = __enter__  # type: ignore[assignment, method-assign]
    FakeTensorMode.__exit__ = __exit__  # type: ignore[method-assign]
    FakeTensorMode.from_tensor = from_tensor  # type: ignore[method-assign]


def _patch_tracing() -> None:
    """Since 2.15 `make_fx()` takes whatever has the `Fake` key for a tensor of a `FakeTensorMode`."""
    original: Callable[..., torch.Tensor | None] = torch.fx.experimental.proxy_tensor.snapshot_fake

    @wraps(original)
    def snapshot_fake(val: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if isinstance(val, FakeTensor) or not _C.is_fake(val):
            return original(val, *args, **kwargs)
        return val.detach()

    torch.fx.experimental.proxy_tensor.snapshot_fake = snapshot_fake
