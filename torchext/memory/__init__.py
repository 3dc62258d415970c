"""How much memory a program needs, when, and who holds it: on fake devices without running it, on the CPU for real."""

from __future__ import annotations

from .categories import Category, Phase
from .fitting import Fit, MaxBatch, fits, max_batch
from .states import Allocation, MemoryState
from .tracking import PINNED, TrackedMemory, track_memory

__all__ = [
    "PINNED",
    "Allocation",
    "Category",
    "Fit",
    "MaxBatch",
    "MemoryState",
    "Phase",
    "TrackedMemory",
    "fits",
    "max_batch",
    "track_memory",
]
