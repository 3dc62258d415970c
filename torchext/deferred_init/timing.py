"""The time that materializing takes, by operator."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from math import prod
from statistics import median
from typing import NamedTuple

import torch

from .. import _C

__all__ = ["TimedOperator", "timed_operators"]

# The numbers of elements of the calls from which times are predicted.
FEW = 16
MANY = 1 << 23


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
    operators, shown, _, seconds = _C.read_recordings(list(deferred.values()), measures=measured)
    planned = sorted(((one.plan, one) for one in operators if one.plan is not None), key=lambda pair: pair[0].place)
    users = _first_users([plan for plan, _ in planned], [place for _, place in shown])
    predictor = Predictor()
    storages = list(deferred)
    return [
        TimedOperator(
            name=f"{one.name}.{one.overload}" if one.overload else one.name,
            storage=storages[user],
            nbytes=int(plan.share * _bytes_written(one)),
            predicted=plan.share * predictor.seconds_of(one),
            measured=took,
        )
        for (plan, one), user, took in zip(planned, users, seconds if measured else repeat(None), strict=False)
    ]


def _first_users(plan: list[_C.PlannedOperator], results: list[int | None]) -> list[int]:
    """Return, for each operator, the index of the first tensor that needs it.

    Args:
        plan: The operators, in the order of their places.
        results: For each tensor, the place of the operator that writes it, or None.
    """
    first = [len(results)] * len(plan)
    for user, place in enumerate(results):
        if place is not None:
            first[place] = min(first[place], user)
    for operator in reversed(plan):
        for place in operator.reads:
            if place is not None:
                first[place] = min(first[place], first[operator.place])
    return first


def _bytes_written(operator: _C.RecordedOperator) -> int:
    return sum(prod(tensor.sizes) * tensor.dtype.itemsize for tensor in operator.writes)


class Predictor:
    """Predicts the time of operators from the time to write new memory on the CPU."""

    def __init__(self) -> None:
        self._costs: dict[tuple[str, torch.dtype], tuple[float, float]] = {}

    def seconds_of(self, operator: _C.RecordedOperator) -> float:
        if operator.allocates:
            return 0
        if _is_fill(operator):
            [target] = operator.writes
            arguments = [None if isinstance(one, _C.RecordedTensor) else one for _, _, one, _ in operator.arguments]
            return self._seconds(operator.name, operator.overload, arguments, target.dtype, prod(target.sizes))
        return self._seconds("aten::zero_", "", [None], torch.uint8, _bytes_written(operator))

    def _seconds(self, name: str, overload: str, arguments: list[object], dtype: torch.dtype, count: int) -> float:
        """Return a time that is linear in `count`: a constant for the call, and one for each element."""
        if (name, dtype) not in self._costs:
            of_few, of_many = (
                median(_C.seconds_of_call(name, overload, arguments, dtype, size) for _ in range(3))
                for size in (FEW, MANY)
            )
            self._costs[name, dtype] = of_few, max(of_many - of_few, 0) / (MANY - FEW)
        of_call, of_element = self._costs[name, dtype]
        return of_call + of_element * count


def _is_fill(operator: _C.RecordedOperator) -> bool:
    """Return true for a random fill on the CPU, whose only tensor is its target."""
    return (
        operator.tape is not None
        and operator.tape[0].type == "cpu"
        and len(operator.tensors) == 1
        and operator.writes == operator.tensors
        and any(name == "generator" for name, *_ in operator.arguments)
    )
