"""Patches of Python code in PyTorch that has to support fake tensors.

They are installed while such a tensor is alive or a block of `fake_mode` or `deferred_init` is open
(`torchext.internals.leases`). Every patch passes real tensors to the original, unchanged.
"""

from __future__ import annotations

from ... import _C
from ...internals.leases import while_fakes_live

# These modules declare their patches.
from .. import (  # noqa: F401
    collectives,
    fake_tensor_mode,
    higher_order,
    initializers,
    meta_functions,
    meta_overrides,
    transformers,
)
from . import (  # noqa: F401
    distributed_tensors,
    gradients,
    optimizers,
    python_data,
    saving,
    sparse,
    storages,
    tensors,
)

__all__: list[str] = []

while_fakes_live.declare(_C.watch_nested_lists)
