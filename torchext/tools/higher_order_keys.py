"""Makes higher-order operators skip our dispatch keys.

`torch.cond` and similar operators choose a Python function by the highest key of their arguments
(`HigherOrderOperator.dispatch`). Among our keys, they have an implementation only for `Fake`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _ops

from .leases import Lease

__all__ = ["pass_by"]

_torch: Any = torch._C
_NAMES = ("TESTING_ONLY_GenericMode", "TESTING_ONLY_GenericWrapper", "DeferredInit")
_KEYS = [_torch._parse_dispatch_key(name) for name in _NAMES]


def pass_by(lease: Lease) -> None:
    """Let all higher-order operators choose by the keys below ours while the lease is held."""
    reason = "has no implementation for our keys"
    lease.patch(_ops.HigherOrderOperator, "dispatch", _passing_by, reason)


def _passing_by(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(self: Any, dispatch_key: Any, *args: Any, **kwargs: Any) -> Any:
        if dispatch_key not in _KEYS:
            return original(self, dispatch_key, *args, **kwargs)
        others = self.non_fallthrough_keys
        for key in _KEYS:
            others = others.remove(key)
        compute_keys: Any = _ops._compute_keyset
        return self.dispatch(compute_keys(args, kwargs, others).highestPriorityTypeId(), *args, **kwargs)

    return dispatch
