"""Dry runs: run one rank of a training job without its GPUs and without the other ranks."""

from __future__ import annotations

from .collectives import Collective, CollectiveSummary, GroupSummary, Place
from .comparing import Comparison, Limit, compare
from .differences import DeviceComparison, Difference, RankComparison
from .report import Report, load_report
from .time_bounds import BoundingOperator, TimeBound, bound_time
from .world import World, world

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
