"""The time that materializing takes, by operator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .. import _C

__all__ = ["TimedOperator", "timed_operators"]


class TimedOperator(NamedTuple):
    """An operator that materializing runs.

    Attributes:
        name: Its name and overload, such as `aten::normal_`.
        storage: The first of the storages that need its results.
        nbytes: The bytes that it writes.
        predicted: The seconds that a random fill of its kind takes for as many bytes, or writing zeros.
        measured: The seconds that it took, or None if it did not run.
    """

    name: str
    storage: int
    nbytes: int
    predicted: float
    measured: float | None


def timed_operators(tensors: Iterable[torch.Tensor], *, measured: bool) -> list[TimedOperator]:
    """Return the operators that materializing the deferred ones of `tensors` runs, in order.

    Args:
        tensors: Any tensors. They do not change.
        measured: Run the operators, and drop the results.

    Raises:
        MaterializationError: An operator cannot be repeated.
        RuntimeError: An operator would move a generator of another device.
    """
    with torch._C.DisableTorchFunctionSubclass():  # lazy parameters raise for their storage
        deferred = {t.untyped_storage()._cdata: t for t in tensors if _C.is_deferred(t)}
    storages = list(deferred)
    return [
        TimedOperator(name, storages[index], nbytes, predicted, took)
        for name, index, nbytes, predicted, took in _C.time_operators(list(deferred.values()), measured)
    ]
