"""The few places where PyTorch's Python code has to know about fake tensors.

Nothing is patched before the first `fake_mode` or `deferred_init` of the process: until then no such tensor exists.
Every patch hands real tensors to the original, unchanged.
"""

from __future__ import annotations

from ... import _C
from ...tools.once import once
from .. import collectives, fake_tensor_mode, higher_order, meta_functions, trunc_normal
from . import optimizers, saving, sparse, storages, tensors

__all__ = ["install"]


@once
def install() -> None:
    """Installs the patches."""
    tensors.install()
    storages.install()
    saving.install()
    fake_tensor_mode.install()
    collectives.install()
    higher_order.install()
    meta_functions.install()
    sparse.install()
    optimizers.install()
    _C.watch_nested_lists()
    if _C.built_for_torch >= "2.12":
        trunc_normal.install()
