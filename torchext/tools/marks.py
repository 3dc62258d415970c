"""The few places where PyTorch's Python code has to know about the key that marked tensors carry.

Tensors are marked as AmpTensors and with the lines that made inference tensors: NOTE [Marked tensors] in
csrc/marks/tensor_marks.h. Nothing is patched before the first use of either. Where `torch.compile` traces there are no
marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _ops
from torch.compiler import is_compiling

from .. import _C
from .once import once
from .patching import patch

__all__ = ["install"]


@once
def install() -> None:
    """Installs the patches."""
    for name in ("new", "new_tensor"):
        patch(Tensor, name, _without_marks, "asks the highest key of `self` for the device")
    _patch_higher_order_operators()


def _without_marks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The oldest factories ask the highest key of `self` for the device (`legacyExtractDispatchKey()`)."""

    def factory(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_compiling() or not isinstance(self, Tensor) or not _C.is_marked(self):
            return original(self, *args, **kwargs)
        plain = _C.without_marks(self)
        if type(self) is not Tensor:
            plain = plain.as_subclass(type(self))
            vars(plain).update(vars(self))
        result = original(plain, *args, **kwargs)
        _C.make_amp_like(result, self)
        return result

    return factory


def _patch_higher_order_operators() -> None:
    """`torch.cond` and its kin choose a Python function by the highest key that they do not fall through."""
    key: Any = torch._C._parse_dispatch_key("TESTING_ONLY_GenericMode")
    _ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(key)
    for op in _ops._higher_order_ops.values():
        op.fallthrough(key)
