"""Patches of Python code in PyTorch that has to support fake tensors.

They are installed while such a tensor is alive or a block of `fake_mode` or `deferred_init` is open
(`torchext.internals.leases`). Every patch passes real tensors to the original, unchanged.
"""

from __future__ import annotations

from ... import _C
from ...internals.leases import while_fakes_live

# These modules declare their patches.
from .. import fake_tensor_mode, higher_order, meta_overrides, python_functions  # noqa: F401
from . import storages, tensors, training  # noqa: F401

__all__: list[str] = []

while_fakes_live.declare(_C.watch_nested_lists)
