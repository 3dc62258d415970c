"""The differences of numbers, devices and ranks in two reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["DeviceComparison", "Difference", "RankComparison"]


@dataclass(frozen=True)
class Difference:
    """A number in two reports.

    Attributes:
        name: The counted thing, such as a category or a source line. A moved line has the place in the new report.
        base: The number in the old report; 0 if it has none.
        head: The number in the new report; 0 if it has none.
        code: The code of a source line.
        is_edited: Whether the code of a source line is not in the old report.
    """

    name: str
    base: int
    head: int
    code: str = ""
    is_edited: bool = False

    @property
    def is_suspect(self) -> bool:
        """Whether this is an edited line that holds more than before."""
        return self.is_edited and self.growth > 0

    @property
    def growth(self) -> int:
        """The difference of the numbers; negative if it has shrunk."""
        return self.head - self.base

    @property
    def change(self) -> str:
        """`added`, `removed`, `grown`, `shrunk` or `equal`."""
        if self.growth == 0:
            return "equal"
        if not (self.base and self.head):
            return "removed" if self.base else "added"
        return "grown" if self.growth > 0 else "shrunk"

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes and properties as builtin types, for JSON."""
        names = ("name", "base", "head", "growth", "change", "code", "is_edited")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class DeviceComparison:
    """The differences of one device of a rank. The lists are at the peaks of allocated memory.

    Attributes:
        device: The device.
        is_gpu: Whether it is a GPU, and not memory of the host.
        peak_reserved: The largest number of bytes that PyTorch reserved.
        peak_allocated: The largest number of bytes that were allocated.
        categories: The bytes by category.
        modules: The bytes by module.
        lines: The bytes by source line.
        line_peaks: The most bytes that each source line held at any moment.
    """

    device: str
    is_gpu: bool
    peak_reserved: Difference
    peak_allocated: Difference
    categories: tuple[Difference, ...]
    modules: tuple[Difference, ...]
    lines: tuple[Difference, ...]
    line_peaks: tuple[Difference, ...]


@dataclass(frozen=True)
class RankComparison:
    """The differences of one rank.

    Attributes:
        rank: The rank.
        devices: The devices, GPUs first.
        collectives: The bytes sent and received, by phase, group and operator.
        flops: The operations of a step or forward pass; empty if they are equal or were not counted in both.
    """

    rank: int
    devices: tuple[DeviceComparison, ...]
    collectives: tuple[Difference, ...]
    flops: tuple[Difference, ...]

    @property
    def peaks(self) -> Iterator[Difference]:
        """The peaks that a limit applies to: those of GPUs, or of the host for a rank without GPUs."""
        gpus = [device for device in self.devices if device.is_gpu]
        for device in gpus or self.devices:
            yield from (device.peak_reserved, device.peak_allocated)
