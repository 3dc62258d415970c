"""The allocations at a moment, and their holders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .categories import Category, Phase

__all__ = ["Allocation", "MemoryState"]


@dataclass(frozen=True)
class Allocation:
    """One allocation.

    Attributes:
        size: The bytes that it occupies on its device, as PyTorch's allocator counts them.
        requested: The requested bytes.
        category: Its purpose.
        phase: The phase of the program that made it.
        operator: The operator that made it, such as `aten::mm`.
        module: The qualified name of the module whose forward or backward pass made it; empty outside of modules.
        line: The source line, if lines are recorded.
        owner: The name of the parameter that it is, or whose gradient or state it is; empty for others.
        born: The number of the event that allocated it; -1 before the tracker.
        died: The number of the event that freed it; -1 if it is alive.
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
        """The module that holds it."""
        return self.owner.rpartition(".")[0] if self.owner else self.module

    @property
    def title(self) -> str:
        """Its name in a list."""
        return self.owner or " ".join(filter(None, (self.module, self.operator)))


@dataclass(frozen=True)
class MemoryState:
    """The memory of a device after an event.

    Attributes:
        device: The device, such as `cuda:0`, or `pinned` for pinned memory of the host.
        event: The number of the event, counted from the beginning of the tracker; -1 before the first.
        seconds: The time since the first event.
        allocated: The bytes in use, as `torch.cuda.memory_allocated()` counts them.
        reserved: The bytes that PyTorch has reserved on the device, as `torch.cuda.memory_reserved()` counts them.
            Equal to `allocated` on devices without a caching allocator. Pinned memory is reserved in powers of two,
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
        """The bytes that are reserved but not in use."""
        return self.reserved - self.allocated


def summed(allocations: list[Allocation], key: Callable[[Allocation], str]) -> dict[str, int]:
    """Return the sums of sizes by `key`, the largest first."""
    sums: dict[str, int] = {}
    for allocation in allocations:
        name = key(allocation)
        sums[name] = sums.get(name, 0) + allocation.size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
