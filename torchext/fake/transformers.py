"""The package transformers, which reads values unless it detects a FakeTensor."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from .. import _C
from ..internals.imports import patching
from ..internals.leases import while_fakes_live

__all__ = ["transformers_see_fakes"]

MODULE = "transformers.utils.import_utils"


def transformers_see_fakes() -> AbstractContextManager[None]:
    """Let transformers detect fakes, so that it skips checks that read values, for example of attention masks.

    transformers may be imported before the block or in it.
    """
    return patching(MODULE, ("is_fake_tensor",), _patch)


def _patch(module: ModuleType) -> None:
    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_fake_tensor(x: Any) -> bool:
            ours = isinstance(x, torch.Tensor) and _C.is_fake(x) and not _C.is_deferred(x)
            return ours or bool(original(x))

        return is_fake_tensor

    while_fakes_live.patch(module, "is_fake_tensor", make, "transformers reads values of masks unless they are fake")
