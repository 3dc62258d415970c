"""Memory reports."""

from __future__ import annotations

from collections.abc import Mapping

from ..internals.results import Column, Table
from .timeline import Allocation, Category, MemoryState, summed

__all__ = ["html_report", "in_units", "report"]


def in_units(nbytes: int) -> str:
    """Return `nbytes` with a unit, such as `1.50 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def report(peak: MemoryState, reserved: int, allocations: list[Allocation], largest: int) -> str:
    """Return the peak of a device by category and module, with the `largest` tensors.

    Args:
        peak: The state with the most allocated bytes.
        reserved: The peak of the reserved bytes.
        allocations: The allocations alive at the peak, the largest first.
        largest: The number of modules and tensors to list.
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


def html_report(peak: MemoryState, reserved: int, allocations: list[Allocation]) -> str:
    """Return the peak of a device by category and by module, as HTML tables."""
    by_category = [(category.label, nbytes) for category, nbytes in _sorted(peak.by_category)]
    by_module = list(summed(allocations, lambda allocation: allocation.holder).items())[:10]
    tables = (
        Table([Column(name), Column("bytes", in_units, is_number=True)], rows)._repr_html_()
        for name, rows in (("category", by_category), ("module", by_module))
    )
    title = f"Peak memory of {peak.device}: {in_units(peak.allocated)} allocated, {in_units(reserved)} reserved"
    return "".join([f"<p>{title}</p>", *tables])


def _sorted(sums: Mapping[Category, int]) -> list[tuple[Category, int]]:
    return sorted(((key, nbytes) for key, nbytes in sums.items() if nbytes), key=lambda item: -item[1])


def _table(rows: list[tuple[str, int]], total: int) -> list[str]:
    return [
        f"  {in_units(nbytes):>12}  {100 * nbytes / max(total, 1):5.1f} %  {name or '(outside of modules)'}"
        for name, nbytes in rows
    ]
