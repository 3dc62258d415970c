"""Our dispatch keys on this thread, and patches of Python code in PyTorch that has to support them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, _ops
from torch.compiler import is_compiling

from .. import _C
from .leases import while_fakes_live, while_marks_live
from .patching import Concerns, Function

__all__ = ["call_on_real_tensors", "is_constructing", "making_fakes", "with_our_keys", "without_our_keys"]

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


def call_on_real_tensors(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Replace a function whose factories must make real tensors: see `Lease.replaces()`."""
    with without_our_keys():
        return original(*args, **kwargs)


@contextmanager
def with_our_keys() -> Iterator[None]:
    """Include our keys again in the block, regardless of the code that excluded them."""
    with (
        torch._C._SetExcludeDispatchKeyGuard(_FAKE, False),
        torch._C._SetExcludeDispatchKeyGuard(_DEFERRED_INIT, False),
    ):
        yield


# ---- Higher-order operators
#
# `torch.cond` and similar operators choose a Python function by the highest key of their arguments
# (`HigherOrderOperator.dispatch`). Among our keys, they have an implementation only for `Fake`.


_torch: Any = torch._C
_NAMES = ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper", "DeferredInit")
_KEYS = [_torch._parse_dispatch_key(name) for name in _NAMES]


@while_marks_live.replaces(_ops.HigherOrderOperator, "dispatch", reason="has no implementation for our keys")
@while_fakes_live.replaces(_ops.HigherOrderOperator, "dispatch", reason="has no implementation for our keys")
def _pass_by(original: Function, self: Any, dispatch_key: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Let all higher-order operators choose by the keys below ours."""
    if dispatch_key not in _KEYS:
        return original(self, dispatch_key, *args, **kwargs)
    others = self.non_fallthrough_keys
    for key in _KEYS:
        others = others.remove(key)
    compute_keys: Any = _ops._compute_keyset
    return self.dispatch(compute_keys(args, kwargs, others).highestPriorityTypeId(), *args, **kwargs)


# ---- The dispatch key of marked tensors
#
# Marks identify AmpTensors and record the source lines that made inference tensors: NOTE [Marked tensors] in
# tensor_marks.h. Nothing is patched before the first use of either. `torch.compile` traces without marks.


@while_marks_live.replaces(
    Tensor, "new", "new_tensor", reason="derives the device from the highest key of `self`", concerns=Concerns.MARKS
)
def _new(original: Function, /, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The oldest factories derive the device from the highest key of `self` (`legacyExtractDispatchKey()`)."""
    if is_compiling() or not isinstance(self, Tensor) or not _C.is_marked(self):
        return original(self, *args, **kwargs)
    plain = _C.without_marks(self)
    if type(self) is not Tensor:
        plain = plain.as_subclass(type(self))
        vars(plain).update(vars(self))
    result = original(plain, *args, **kwargs)
    _C.make_amp_like(result, self)
    return result
