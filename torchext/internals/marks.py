"""Patches of Python code in PyTorch that has to support the dispatch key of marked tensors.

Marks identify AmpTensors and record the source lines that made inference tensors: NOTE [Marked tensors] in
tensor_marks.h. Nothing is patched before the first use of either. `torch.compile` traces without marks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from .. import _C
from . import dispatch_keys as dispatch_keys  # declares the patch of higher-order operators
from .leases import while_marks_live
from .patching import Concerns, Function

__all__: list[str] = []


@while_marks_live.replaces(
    Tensor, "new", "new_tensor", reason="derives the device from the highest key of `self`", concerns=Concerns.MARKS
)
def _new(original: Function, /, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The oldest factories derive the device from the highest key of `self` (`legacyExtractDispatchKey()`)."""
    if is_compiling() or not isinstance(self, Tensor) or not _C.is_marked(self):
        return original(self, *args, **kwargs)
    plain = _C.without_marks(self)
    if type(self) is not Tensor:
        plain = plain.as_subclass(type(self))
        vars(plain).update(vars(self))
    result = original(plain, *args, **kwargs)
    _C.make_amp_like(result, self)
    return result
