"""Patches of Python code in PyTorch that has to support fake tensors.

They are installed while such a tensor is alive or a block of `fake_mode` or `deferred_init` is open
(`torchext.internals.leases`). Every patch passes real tensors to the original, unchanged.
"""

from __future__ import annotations

from ... import _C
from ...internals.leases import while_fakes_live
from ...internals.torch_release import DIFFERENCES
from .. import collectives, fake_tensor_mode, higher_order, initializers, meta_functions, meta_overrides
from . import gradients, optimizers, python_data, saving, sparse, storages, tensors

__all__: list[str] = []

while_fakes_live.declare(
    tensors.install,
    python_data.install,
    storages.install,
    saving.install,
    fake_tensor_mode.install,
    collectives.install,
    higher_order.install,
    meta_functions.install,
    meta_overrides.install,
    sparse.install,
    optimizers.install,
    gradients.install,
    _C.watch_nested_lists,
)
if DIFFERENCES["masks_of_truncated_normals"].applies:
    while_fakes_live.declare(initializers.install)
