"""Count floating-point operations with PyTorch's `FlopCounterMode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, bmm_flop, mm_flop

__all__ = ["counting_flops"]


def _with_addend(formula: Callable[..., int]) -> Callable[..., int]:
    def flops(addend: Any, a: Any, b: Any, *dtype: Any, **kwargs: Any) -> int:
        return formula(a, b)

    return flops


def _bmm_flop(a: Any, b: Any, *dtype: Any, **kwargs: Any) -> int:
    return int(bmm_flop(a, b))


# PyTorch's formulas do not accept the overloads with the dtype of the result.
FORMULAS = {
    torch.ops.aten.addmm: _with_addend(mm_flop),
    torch.ops.aten.bmm: _bmm_flop,
    torch.ops.aten.baddbmm: _with_addend(_bmm_flop),
}


class _NoModules:
    """Replaces `FlopCounterMode.mod_tracker`, which fails for some calls of `torch.autograd.grad()`.

    Reports need only totals.
    """

    parents = ("Global",)

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


def counting_flops() -> FlopCounterMode:
    """Return a mode that counts the operations of the operators in its block."""
    mode = FlopCounterMode(display=False, custom_mapping=FORMULAS)
    mode.mod_tracker = _NoModules()  # type: ignore[assignment]
    return mode
