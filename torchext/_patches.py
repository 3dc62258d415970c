"""The few places where PyTorch's Python code has to know about fake tensors.

Nothing is patched before the first `fake_mode` or `deferred_init` of the process: until then no such tensor exists.
Every patch hands real tensors to the original, unchanged.
"""

from __future__ import annotations

from . import (
    _C,
    _data_patches,
    _distributed_patches,
    _fake_tensor_mode,
    _higher_order,
    _meta_functions,
    _optimizer_patches,
    _saving_patches,
    _sparse_patches,
    _tensor_patches,
    _trunc_normal,
)
from ._once import once

__all__ = ["install"]


@once
def install() -> None:
    """Installs the patches."""
    _tensor_patches.install()
    _data_patches.install()
    _saving_patches.install()
    _fake_tensor_mode.install()
    _distributed_patches.install()
    _higher_order.install()
    _meta_functions.install()
    _sparse_patches.install()
    _optimizer_patches.install()
    _C.watch_nested_lists()
    if _C.built_for_torch >= "2.12":
        _trunc_normal.install()
