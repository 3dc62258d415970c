"""Dry runs: run one rank of a training job without its GPUs and without the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..internals.imports import names_from

if TYPE_CHECKING:
    from ..fake.values import LinePolicy, ValuePolicy
    from ..reports.comparison import Comparison, DeviceComparison, Difference, Limit, RankComparison, compare
    from ..reports.model import BoundingOperator, TimeBound
    from ..reports.text import Report, load_report
    from .collectives import Collective, CollectiveSummary, GroupSummary, Place
    from .simulated_world import World, world
    from .time import bound_time
else:  # hidden from type checkers, which otherwise accept any name
    __getattr__ = names_from(
        __name__,
        *("collectives", ".reports.comparison", ".reports.model", ".reports.text"),
        *("time", "simulated_world", ".fake.values"),  # these import PyTorch
    )

__all__ = [
    "BoundingOperator",
    "Collective",
    "CollectiveSummary",
    "Comparison",
    "DeviceComparison",
    "Difference",
    "GroupSummary",
    "Limit",
    "LinePolicy",
    "Place",
    "RankComparison",
    "Report",
    "TimeBound",
    "ValuePolicy",
    "World",
    "bound_time",
    "compare",
    "load_report",
    "world",
]


def __dir__() -> list[str]:
    return __all__
