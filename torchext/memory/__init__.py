"""The memory that a program needs: how much, when, and for which tensors. On fake GPUs, or on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..internals.imports import names_from

if TYPE_CHECKING:
    from ..advice.advice import Advice, Outcome
    from ..advice.remedies import Block, Numerics, Remedy
    from ..advice.searching import advise
    from ..fake.values import AssumedValue, LinePolicy, ValuePolicy
    from .fitting import Fit, MaxBatch, fits, max_batch
    from .timeline import PINNED, Allocation, Category, MemoryState, Phase
    from .tracking import TrackedMemory, track_memory
else:  # hidden from type checkers, which otherwise accept any name
    __getattr__ = names_from(
        __name__,
        *("timeline", ".advice.advice", ".advice.searching", ".advice.remedies", "fitting", "tracking"),
        ".fake.values",
    )

__all__ = [
    "PINNED",
    "Advice",
    "Allocation",
    "AssumedValue",
    "Block",
    "Category",
    "Fit",
    "LinePolicy",
    "MaxBatch",
    "MemoryState",
    "Numerics",
    "Outcome",
    "Phase",
    "Remedy",
    "TrackedMemory",
    "ValuePolicy",
    "advise",
    "fits",
    "max_batch",
    "track_memory",
]


def __dir__() -> list[str]:
    return __all__
