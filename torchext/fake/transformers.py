"""The package transformers, which reads values unless it sees a FakeTensor."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import _C
from ..tools.imports import once_imported
from ..tools.leases import while_fakes_live

__all__ = ["transformers_see_fakes"]

MODULE = "transformers.utils.import_utils"


@contextmanager
def transformers_see_fakes() -> Iterator[None]:
    """Where it sees a FakeTensor, transformers leaves out checks that read values, of attention masks say.

    It may be imported before the block or in it.
    """
    _teach()
    with once_imported(MODULE, _teach):
        yield


def _teach() -> None:
    module: Any = sys.modules.get(MODULE)
    if hasattr(module, "is_fake_tensor"):
        _patch_transformers(module)


_patched_transformers: set[int] = set()


def _patch_transformers(module: Any) -> None:
    if id(module) in _patched_transformers:
        return
    _patched_transformers.add(id(module))

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_fake_tensor(x: Any) -> bool:
            ours = isinstance(x, torch.Tensor) and _C.is_fake(x) and not _C.is_deferred(x)
            return ours or bool(original(x))

        return is_fake_tensor

    while_fakes_live.patch(module, "is_fake_tensor", make, "transformers reads values of masks unless they are fake")
