"""Dry runs: run one rank of a training job without its GPUs and without the other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tools.imports import names_from

if TYPE_CHECKING:
    from .collectives import Collective, CollectiveSummary, GroupSummary, Place
    from .comparing import Comparison, Limit, compare
    from .differences import DeviceComparison, Difference, RankComparison
    from .report import Report, load_report
    from .simulated_world import World, world
    from .time_bounds import bound_time
    from .time_tables import BoundingOperator, TimeBound

__all__ = [
    "BoundingOperator",
    "Collective",
    "CollectiveSummary",
    "Comparison",
    "DeviceComparison",
    "Difference",
    "GroupSummary",
    "Limit",
    "Place",
    "RankComparison",
    "Report",
    "TimeBound",
    "World",
    "bound_time",
    "compare",
    "load_report",
    "world",
]

__getattr__ = names_from(
    __name__,
    *("collectives", "comparing", "differences", "report", "time_tables"),
    *("time_bounds", "simulated_world"),  # these import PyTorch
)


def __dir__() -> list[str]:
    return __all__
