"""What is allocated at a moment, and who holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .categories import Category, Phase

__all__ = ["Allocation", "MemoryState"]


@dataclass(frozen=True)
class Allocation:
    """One piece of memory.

    Attributes:
        size: The bytes that it takes of its device, as PyTorch's allocator counts them.
        requested: The bytes that were asked for.
        category: What it is for.
        phase: What the program was doing when it was made.
        operator: The operator that made it, such as `aten::mm`.
        module: The qualified name of the module that was running, or whose backward pass was; empty if there was none.
        line: The line of the program, if lines are tracked.
        owner: The name of the parameter that it is, or whose gradient or state it is; empty for others.
        born: The number of the event with which it was made; -1 if it was there before the tracker.
        died: The number of the event with which it was freed; -1 if it was not.
    """

    size: int
    requested: int
    category: Category
    phase: Phase
    operator: str
    module: str
    line: str
    owner: str
    born: int
    died: int

    @property
    def holder(self) -> str:
        """The module that it belongs to."""
        return self.owner.rpartition(".")[0] if self.owner else self.module

    @property
    def title(self) -> str:
        """A name for it in a list."""
        return self.owner or " ".join(filter(None, (self.module, self.operator)))


@dataclass(frozen=True)
class MemoryState:
    """The memory of a device after an event.

    Attributes:
        device: Such as `cuda:0`, or `pinned` for pinned memory of the host.
        event: The number of the event, counted from the beginning of the tracker; -1 before the first.
        seconds: The time of the event, since the first.
        allocated: The bytes that are in use, as `torch.cuda.memory_allocated()` counts them.
        reserved: The bytes that PyTorch has taken from the device, as `torch.cuda.memory_reserved()` counts them. On
            devices without a caching allocator as many as are allocated. Pinned memory is allocated in powers of two,
            and kept.
        by_category: The bytes in use for each purpose.
    """

    device: str
    event: int
    seconds: float
    allocated: int
    reserved: int
    by_category: Mapping[Category, int]

    @property
    def fragmentation(self) -> int:
        """The bytes that are reserved and not in use."""
        return self.reserved - self.allocated


def summed(allocations: list[Allocation], key: Callable[[Allocation], str]) -> dict[str, int]:
    """Adds up sizes by `key`, the largest sum first."""
    sums: dict[str, int] = {}
    for allocation in allocations:
        name = key(allocation)
        sums[name] = sums.get(name, 0) + allocation.size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
