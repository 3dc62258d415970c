"""Patches of Python code in PyTorch that has to support the dispatch key of marked tensors.

Marks identify AmpTensors and record the source lines that made inference tensors: NOTE [Marked tensors] in
tensor_marks.h. Nothing is patched before the first use of either. `torch.compile` traces without marks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.compiler import is_compiling

from .. import _C
from .dispatch_keys import pass_by
from .leases import while_marks_live
from .patching import Concerns

__all__ = ["install"]


def install() -> None:
    """Declare the patches."""
    reason = "derives the device from the highest key of `self`"
    for name in ("new", "new_tensor"):
        while_marks_live.patch(Tensor, name, _without_marks, reason, concerns=Concerns.MARKS)
    pass_by(while_marks_live)


while_marks_live.declare(install)


def _without_marks(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The oldest factories derive the device from the highest key of `self` (`legacyExtractDispatchKey()`)."""

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
