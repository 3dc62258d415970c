"""Dry runs: run one rank of a training job without its GPUs and without the other ranks."""

from __future__ import annotations

from .collectives import Collective, CollectiveSummary, GroupSummary, Place
from .world import World, world

__all__ = ["Collective", "CollectiveSummary", "GroupSummary", "Place", "World", "world"]
