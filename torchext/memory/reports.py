"""Reports of memory as tables."""

from __future__ import annotations

from collections.abc import Mapping

from .categories import Category
from .states import Allocation, MemoryState, summed

__all__ = ["in_units", "report"]


def in_units(nbytes: int) -> str:
    """Returns `nbytes` as a person reads it: "1.50 GiB"."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def report(peak: MemoryState, reserved: int, allocations: list[Allocation], largest: int) -> str:
    """Returns the peak of a device by category and module, with the `largest` tensors.

    Args:
        peak: The state with the most allocated bytes.
        reserved: The most bytes that were reserved.
        allocations: What was alive at the peak, the largest first.
        largest: How many modules and tensors to list.
    """
    by_module = summed(allocations, lambda allocation: allocation.holder)
    lines = [
        f"Peak memory of {peak.device}: {in_units(peak.allocated)} allocated, {in_units(reserved)} reserved",
        "",
        *_table([(category.label, nbytes) for category, nbytes in _sorted(peak.by_category)], peak.allocated),
        f"  {in_units(peak.fragmentation):>12}           fragmentation (reserved and not in use)",
        "",
        "By module",
        *_table(list(by_module.items())[:largest], peak.allocated),
        "",
        "Largest tensors",
        *(
            f"  {in_units(allocation.size):>12}  {allocation.category.label:<15}  {allocation.title}"
            + (f"  ({allocation.line})" if allocation.line else "")
            for allocation in allocations[:largest]
        ),
    ]
    return "\n".join(lines)


def _sorted(sums: Mapping[Category, int]) -> list[tuple[Category, int]]:
    return sorted(((key, nbytes) for key, nbytes in sums.items() if nbytes), key=lambda item: -item[1])


def _table(rows: list[tuple[str, int]], total: int) -> list[str]:
    return [
        f"  {in_units(nbytes):>12}  {100 * nbytes / max(total, 1):5.1f} %  {name or '(outside of modules)'}"
        for name, nbytes in rows
    ]
