"""Reports and plots of memory."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from ..internals.document import Column, Part, Table, as_html, as_text
from ..internals.text import in_units
from .timeline import Allocation, Category, MemoryState, summed

__all__ = [
    "curve_of",
    "html_report",
    "in_units",
    "page_of",
    "plot",
    "report",
    "table_of_categories",
    "table_of_tensors",
]


# ---- Memory reports


def report(peak: MemoryState, reserved: int, allocations: list[Allocation], largest: int) -> str:
    """Return the peak of a device by category and module, with the `largest` tensors, as text.

    Args:
        peak: The state with the most allocated bytes.
        reserved: The peak of the reserved bytes.
        allocations: The allocations alive at the peak, the largest first.
        largest: The number of modules and tensors to list.
    """
    return as_text(_document(peak, reserved, allocations, largest))


def html_report(peak: MemoryState, reserved: int, allocations: list[Allocation]) -> str:
    """Return the same as HTML, with 10 modules and tensors."""
    return as_html(_document(peak, reserved, allocations, 10))


def _document(peak: MemoryState, reserved: int, allocations: list[Allocation], largest: int) -> Iterator[Part]:
    yield f"Peak memory of {peak.device}: {in_units(peak.allocated)} allocated, {in_units(reserved)} reserved"
    by_category = {category.label: nbytes for category, nbytes in peak.by_category.items() if nbytes}
    yield table_of_categories(by_category, peak.allocated, peak.fragmentation)
    sums, total = summed(allocations, lambda allocation: allocation.holder), max(peak.allocated, 1)
    modules = [(nbytes, 100 * nbytes / total, name or "(outside of modules)") for name, nbytes in sums.items()]
    yield Table((*SHARES, "module"), modules[:largest], "By module")
    tensors = [(one.size, one.category.label, one.title, one.line or None) for one in allocations[:largest]]
    yield table_of_tensors(tensors, "Largest tensors")


SHARES = Column("bytes", in_units), Column("share", "{:.1f} %".format)


def table_of_categories(sums: Mapping[str, int], total: int, fragmentation: int, title: str = "") -> Table:
    """Return the bytes of each category, the most first, and their shares of the allocated bytes."""
    rows = [(name, nbytes, 100 * nbytes / max(total, 1)) for name, nbytes in sums.items()]
    rows.sort(key=lambda row: -row[1])
    return Table(("category", *SHARES), [*rows, ("fragmentation", fragmentation, None)], title)


def table_of_tensors(rows: Iterable[tuple[int, str, str, str | None]], title: str) -> Table:
    """Return a table of the bytes, the category, the name and the source line of tensors."""
    return Table((SHARES[0], "category", "name", Column("line", is_optional=True)), rows, title)


# ---- Plots of memory over time


# From the bottom up: constant memory first, the most variable on top.
COLORS = {
    Category.PARAMETER: "#4477aa",
    Category.OPTIMIZER_STATE: "#228833",
    Category.GRADIENT: "#66ccee",
    Category.COMMUNICATION: "#aa3377",
    Category.INPUT: "#bbbbbb",
    Category.ACTIVATION: "#ee6677",
    Category.TEMPORARY: "#ccbb44",
    Category.WORKSPACE: "#555555",
}
ORDER = list(COLORS)

UNUSED = "not in use"
COLOR_OF_UNUSED = "#eeeeee"

DETAILED = 120  # the number of moments with a list of holders
LARGEST = 12  # the number of holders in it

AllocationsAt: TypeAlias = Callable[[list[int]], Iterable[list[Allocation]]]


def plot(path: Path, states: list[MemoryState], peak: MemoryState, allocations_at: AllocationsAt) -> None:
    """Plot into `path`, in the format of its suffix.

    Args:
        path: The file.
        states: The curve.
        peak: The state with the most allocated bytes.
        allocations_at: Returns the `LARGEST` allocations alive after each of some events, the largest first.
    """
    if path.suffix == ".html":
        path.write_text(page_of(curve_of(states, peak, allocations_at)), encoding="utf-8")
    elif path.suffix in (".svg", ".png"):
        _draw(path, states)
    else:
        raise ValueError(f"`path`: expected a name that ends with .html, .svg or .png, got {str(path)!r}.")


def _draw(path: Path, states: list[MemoryState]) -> None:
    try:
        from matplotlib import rc_context  # type: ignore[import-not-found, unused-ignore]
        from matplotlib.figure import Figure  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"Drawing {path.name} needs matplotlib (`pip install matplotlib`); a name that ends with .html does not."
        ) from error
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    used = [category for category in ORDER if any(state.by_category[category] for state in states)]
    gib = 2**30
    axes.stackplot(
        [state.event for state in states],
        [
            *([state.by_category[category] / gib for state in states] for category in used),
            [state.fragmentation / gib for state in states],
        ],
        labels=[*(category.label for category in used), UNUSED],
        colors=[*(COLORS[category] for category in used), COLOR_OF_UNUSED],
        step="post",
    )
    axes.plot(
        [state.event for state in states], [state.reserved / gib for state in states], "k--", lw=0.8, label="reserved"
    )
    axes.set_xlabel("allocations and frees")
    axes.set_ylabel(f"GiB on {states[0].device}")
    axes.margins(x=0)
    axes.legend(loc="upper left", fontsize="small")
    # Equal plots are equal files.
    with rc_context({"svg.hashsalt": "torchext", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def page_of(curve: Mapping[str, Any]) -> str:
    """Return a self-contained HTML report: the curve, and the holders of memory at the moment under the cursor.

    Args:
        curve: The result of `curve_of()`.
    """
    text = json.dumps(curve, sort_keys=True, separators=(",", ":")).replace("</", "<\\/")
    title = f"Memory of {curve['device']}: {in_units(curve['peak_allocated'])} at the peak"
    page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("@TITLE@", html.escape(title)).replace("@DATA@", text)


def curve_of(states: list[MemoryState], peak: MemoryState, allocations_at: AllocationsAt) -> dict[str, Any]:
    """Return the data of the HTML report, as values that `json.dumps()` takes. The arguments are those of `plot()`."""
    return {
        "device": peak.device,
        "peak_allocated": peak.allocated,
        "categories": [
            *({"name": category.label, "color": COLORS[category]} for category in ORDER),
            {"name": UNUSED, "color": COLOR_OF_UNUSED},
        ],
        "points": [_point(state) for state in states],
        "seconds": [round(state.seconds, 6) for state in states],
        "details": _details(states, peak, allocations_at),
    }


def _point(state: MemoryState) -> list[int]:
    used = [state.by_category[category] for category in ORDER]
    return [state.event, state.reserved, *used, state.fragmentation]


def _details(states: list[MemoryState], peak: MemoryState, allocations_at: AllocationsAt) -> dict[str, Any]:
    """Return the largest holders at the peak, and at moments spread over the curve."""
    stride = max(1, len(states) // DETAILED)
    events = sorted({peak.event, *(state.event for state in states[::stride])})
    details = {}
    for event, allocations in zip(events, allocations_at(events), strict=True):
        details[str(event)] = [
            [allocation.size, allocation.category.label, allocation.title, allocation.line]
            for allocation in allocations
        ]
    return {"peak": peak.event, "at": details}
