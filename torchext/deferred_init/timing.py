"""How long materializing takes, by operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .. import _C

__all__ = ["TimedOperator", "timed_operators"]


class TimedOperator(NamedTuple):
    """An operator that materializing runs.

    Attributes:
        name: Its name and overload, as in `aten::normal_`.
        storage: The first of the storages that need what it computes.
        nbytes: How many bytes it writes.
        predicted: Seconds, if it fills memory as fast as random fills of its kind do, or as zeros are written.
        measured: Seconds that it took, or None if it was not run.
    """

    name: str
    storage: int
    nbytes: int
    predicted: float
    measured: float | None


def timed_operators(tensors: Iterable[torch.Tensor], *, measured: bool) -> list[TimedOperator]:
    """Returns what materializing those of `tensors` that are deferred runs, in its order.

    Args:
        tensors: Any tensors. They stay as they are.
        measured: Run it, and drop the results.

    Raises:
        RuntimeError: As materializing, or if running an operator would move a generator of another device.
    """
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters refuse to show theirs
        deferred = {t.untyped_storage()._cdata: t for t in tensors if _C.is_deferred(t)}
    storages = list(deferred)
    return [
        TimedOperator(name, storages[index], nbytes, predicted, took)
        for name, index, nbytes, predicted, took in _C.time_operators(list(deferred.values()), measured)
    ]
