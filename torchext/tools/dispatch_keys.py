"""Access to this thread's dispatch keys for fakes and deferred initialization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .. import _C

__all__ = ["is_constructing", "making_fakes", "with_our_keys", "without_our_keys"]

_FAKE, _DEFERRED_INIT = (torch._C._dispatch_key_parse(name) for name in ("Fake", "DeferredInit"))
_OURS = torch._C.DispatchKeySet(_FAKE).add(_DEFERRED_INIT)


def is_constructing() -> bool:
    """Return true if this thread is in a block of `deferred_init`."""
    return torch._C._dispatch_tls_is_dispatch_key_included("DeferredInit")


@contextmanager
def making_fakes() -> Iterator[None]:
    """Let factories on this thread make fakes in the block, inside and outside of `fake_mode`."""
    _C.enter_fake_mode()
    try:
        yield
    finally:
        _C.leave_fake_mode()


def without_our_keys() -> AbstractContextManager[None]:
    """Exclude our dispatch keys on this thread in the block, so that factories make real tensors."""
    return torch._C._ExcludeDispatchKeyGuard(_OURS)


@contextmanager
def with_our_keys() -> Iterator[None]:
    """Include our keys again in the block, regardless of the code that excluded them."""
    with (
        torch._C._SetExcludeDispatchKeyGuard(_FAKE, False),
        torch._C._SetExcludeDispatchKeyGuard(_DEFERRED_INIT, False),
    ):
        yield
