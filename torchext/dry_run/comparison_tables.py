"""Comparisons of reports as text, as Markdown and as HTML."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..memory.reports import in_units
from ..tools.results import Column, Table
from .differences import DeviceComparison, Difference, RankComparison
from .reports import operations

__all__ = ["html_tables", "markdown", "text"]

Ranks: TypeAlias = Sequence[RankComparison]

MOST_ROWS = 10
CODE = ("category", "module", "line", "collective", "code")
EQUAL = "No peak has changed."


def text(notes: Sequence[str], ranks: Ranks) -> str:
    """Return the differences for a terminal."""
    parts = [*notes, str(_peaks(ranks)) if _has_changed(ranks) else EQUAL]
    parts += [f"{title}\n{table}" for title, table in _tables(ranks)]
    return "\n\n".join(parts)


def html_tables(notes: Sequence[str], ranks: Ranks) -> str:
    """Return the differences for a notebook."""
    notes = [f"<p>{html.escape(note)}</p>" for note in notes]
    tables = [f"<h4>{html.escape(title)}</h4>{table._repr_html_()}" for title, table in _tables(ranks)]
    return "".join([*notes, _peaks(ranks)._repr_html_(), *tables])


def markdown(notes: Sequence[str], ranks: Ranks) -> str:
    """Return the differences for a comment on a pull request: the peaks, and folded tables."""
    parts = ["### Peak memory", *notes]
    parts += [_markdown(_peaks(ranks))] if _has_changed(ranks) else [EQUAL]
    for title, table in _tables(ranks):
        parts.append(f"<details><summary>{html.escape(title)}</summary>\n\n{_markdown(table)}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    names = [column.name for column in table.columns]
    rule = ["---:" if column.is_number else "---" for column in table.columns]
    rows = [[_cell(column, value) for column, value in zip(table.columns, row, strict=True)] for row in table.rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rule, *rows))


def _cell(column: Column, value: object) -> str:
    shown = "" if value is None else column.text(value).replace("|", r"\|").replace("\n", " ")
    if not shown or column.name not in CODE:
        return shown
    return f"`` {shown} ``" if "`" in shown else f"`{shown}`"


def _has_changed(ranks: Ranks) -> bool:
    return any(one.growth for rank in ranks for device in rank.devices for one in _both(device))


def _both(device: DeviceComparison) -> tuple[Difference, Difference]:
    return device.peak_reserved, device.peak_allocated


def _peaks(ranks: Ranks) -> Table:
    columns = [Column("rank", is_number=True), Column("device"), Column("peak"), *_numbers(in_units)]
    rows = [
        (rank.rank, device.device, peak.name.removeprefix("peak "), *_row(peak))
        for rank in ranks
        for device in rank.devices
        for peak in _both(device)
    ]
    return Table([*columns, Column("", is_number=True)], [(*row, _percent(row[3], row[5])) for row in rows])


def _percent(base: int, growth: int) -> str | None:
    return f"{100 * growth / base:+.1f} %" if base and growth else None


def _numbers(units: Callable[[int], str]) -> list[Column]:
    def signed(number: int) -> str:
        return f"{'+' if number > 0 else ''}{units(number)}"

    return [
        Column("base", units, is_number=True),
        Column("head", units, is_number=True),
        Column("growth", signed, is_number=True),
    ]


def _row(one: Difference) -> tuple[int, int, int]:
    return one.base, one.head, one.growth


def _tables(ranks: Ranks) -> Iterator[tuple[str, Table]]:
    """Yield titles and tables of the changes, once for ranks that changed alike."""
    alike: list[tuple[RankComparison, list[int]]] = []
    for rank in ranks:
        numbers = next((numbers for one, numbers in alike if replace(one, rank=rank.rank) == rank), None)
        if numbers is None:
            alike.append((rank, numbers := []))
        numbers.append(rank.rank)
    for rank, numbers in alike:
        which = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        for device in rank.devices:
            place = f"of {device.device} on {which}"
            kinds = (
                ("category", "at the peak", device.categories),
                ("module", "at the peak", device.modules),
                ("line", "at the peak", device.lines),
                ("line", "at any moment", device.line_peaks),
            )
            for name, moment, found in kinds:
                if found:
                    yield f"By {name} {moment} {place}{_left_out(found)}", _table(name, found, in_units)
        if rank.collectives:
            title = f"Bytes of collectives on {which}, sent and received"
            yield title + _left_out(rank.collectives), _table("collective", rank.collectives, in_units)
        if rank.flops:
            yield f"Floating-point operations on {which}", _table("in a", rank.flops, _operations)


def _change(one: Difference) -> str:
    return "edited" if one.is_suspect and one.base else one.change


def _operations(flops: float) -> str:
    return f"-{operations(-flops)}" if flops < 0 else operations(flops)


def _left_out(found: Sequence[Difference]) -> str:
    return f" (the largest {MOST_ROWS} of {len(found)} changes)" if len(found) > MOST_ROWS else ""


def _table(name: str, found: Sequence[Difference], units: Callable[[int], str]) -> Table:
    codes = [Column("code")] if any(one.code for one in found) else []
    rows = [
        (_change(one), *_row(one), one.name or "(outside of modules)", one.code)[: 5 + len(codes)]
        for one in found[:MOST_ROWS]
    ]
    return Table([Column("change"), *_numbers(units), Column(name), *codes], rows)
