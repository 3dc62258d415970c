"""The memory that a program needs: how much, when, and for which tensors. On fake GPUs, or on the CPU."""

from __future__ import annotations

from .advice import Advice, Outcome
from .advising import advise
from .categories import Category, Phase
from .fitting import Fit, MaxBatch, fits, max_batch
from .states import Allocation, MemoryState
from .tracking import PINNED, TrackedMemory, track_memory

__all__ = [
    "PINNED",
    "Advice",
    "Allocation",
    "Category",
    "Fit",
    "MaxBatch",
    "MemoryState",
    "Outcome",
    "Phase",
    "TrackedMemory",
    "advise",
    "fits",
    "max_batch",
    "track_memory",
]
