"""Dry runs: one process of a training job, on a machine without its GPUs and without the other processes."""

from __future__ import annotations

from .collectives import Collective, GroupSummary, Place
from .world import World, world

__all__ = ["Collective", "GroupSummary", "Place", "World", "world"]
