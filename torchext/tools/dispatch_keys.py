"""The dispatch keys of fakes and of deferred initialization on this thread, from Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from .. import _C

__all__ = ["is_constructing", "making_fakes", "with_our_keys", "without_our_keys"]

_FAKE, _DEFERRED_INIT = (torch._C._dispatch_key_parse(name) for name in ("Fake", "DeferredInit"))
_OURS = torch._C.DispatchKeySet(_FAKE).add(_DEFERRED_INIT)


def is_constructing() -> bool:
    """Tells whether this thread is in a block of `deferred_init`."""
    return torch._C._dispatch_tls_is_dispatch_key_included("DeferredInit")


@contextmanager
def making_fakes() -> Iterator[None]:
    """Lets what factories make on this thread be fake in the block, in and out of `fake_mode`."""
    _C.enter_fake_mode()
    try:
        yield
    finally:
        _C.leave_fake_mode()


def without_our_keys() -> AbstractContextManager[None]:
    """Lets this thread compute in the block as if torchext were not there; what it makes is real."""
    return torch._C._ExcludeDispatchKeyGuard(_OURS)


@contextmanager
def with_our_keys() -> Iterator[None]:
    """Undoes the exclusion of our keys in the block, whoever has excluded them."""
    with (
        torch._C._SetExcludeDispatchKeyGuard(_FAKE, False),
        torch._C._SetExcludeDispatchKeyGuard(_DEFERRED_INIT, False),
    ):
        yield
