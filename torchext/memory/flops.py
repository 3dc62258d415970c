"""Count the floating-point operations of this rank with PyTorch's `FlopCounterMode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.utils.flop_counter import FlopCounterMode, _FlopCounterMode, bmm_flop, mm_flop

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


OnOperator = Callable[[Any, int, Any, tuple[Any, ...], dict[str, Any]], None]


class _Counter(FlopCounterMode):
    """Counts operators of plain tensors, and calls `on_operator` for each."""

    def __init__(self, on_operator: OnOperator | None) -> None:
        super().__init__(display=False, custom_mapping=FORMULAS)
        self.mod_tracker = _NoModules()  # type: ignore[assignment]
        self._on_operator = on_operator

    def __enter__(self) -> _Counter:
        self.flop_counts.clear()
        self.mode = _OfPlainTensors(self)
        self.mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        totals = self.flop_counts["Global"]
        before = totals[func_packet]
        super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]
        if self._on_operator is not None:
            self._on_operator(func_packet, totals[func_packet] - before, out, args, kwargs)
        return out


class _OfPlainTensors(_FlopCounterMode):
    """Leaves subclasses, such as DTensor, to their own dispatch, which calls operators on the shard of this rank."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = [one for one in types if one.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl]
        if any(issubclass(one, FakeTensor) for one in others):  # DTensor propagates shapes with them
            return func(*args, **(kwargs or {}))
        if others:
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def counting_flops(on_operator: OnOperator | None = None) -> FlopCounterMode:
    """Return a mode that counts the operations of the operators in its block.

    Args:
        on_operator: Called after each operator, with the operator, its number of operations, its result, and its
            arguments.
    """
    return _Counter(on_operator)
