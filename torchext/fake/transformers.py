"""The package transformers, which reads values unless it detects a FakeTensor."""

from __future__ import annotations

from typing import Any

import torch

from .. import _C
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

__all__: list[str] = []


@while_fakes_live.replaces(
    "transformers.utils.import_utils",
    "is_fake_tensor",
    needs="is_fake_tensor",
    reason="transformers reads values of masks unless they are fake",
)
def _is_fake_tensor(original: Function, x: Any) -> bool:
    """Transformers then skips checks that read values, for example of attention masks."""
    ours = isinstance(x, torch.Tensor) and _C.is_fake(x) and not _C.is_deferred(x)
    return ours or bool(original(x))
