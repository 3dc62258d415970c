"""Reports as text and HTML, also of saved reports, from the content of the JSON report (`reports/model.py`)."""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ..descriptions import INTEGER, KINDS, SHAPE
from ..internals import terminal
from ..memory.plots import in_units, page_of
from .model import (
    FORWARD,
    HEADINGS,
    USES_NO_GPU,
    operator_rows,
    sentence,
    with_times_apart,
    with_times_in_place,
)

__all__ = [
    "Report",
    "fits",
    "html_report",
    "html_tables",
    "load_report",
    "operations",
    "text_report",
    "verdict",
]


# ---- Text and HTML


Row = Sequence[object]
Content: TypeAlias = Mapping[str, Any]

MOST_FILES = 20


def operations(flops: float) -> str:
    """Return a number of floating-point operations with its unit."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if flops < 1000:
            return f"{flops:.3g} {unit}"
        flops /= 1000
    return f"{flops:.4g} PFLOP"


def fits(rank: Content) -> bool:
    """Return true if the rank fits and has reached its goal."""
    return bool(rank["outcome"] == "fits")


def verdict(rank: Content) -> str:
    """Return the outcome of a rank, the number of its steps, and its duration."""
    if rank["program_exit_code"] and not (rank["error"] or rank["mismatches"]):
        outcome = f"the program exited with code {rank['program_exit_code']},"
    else:
        outcome = {"failed": "the program failed,", "too few": "ended after"}.get(
            rank["outcome"], f"{rank['outcome']},"
        )
    return f"{outcome} {_amount(rank)} in {rank['seconds']:.1f} s"


def _amount(rank: Content) -> str:
    if rank["requested"] is None:
        return f"{_count(rank['completed'], rank['unit'])} to its end"
    return f"{rank['completed']} of {_count(rank['requested'], rank['unit'])}"


def _count(number: int, unit: str) -> str:
    plural = unit + ("es" if unit.endswith("s") else "s")
    return f"{number} {unit if number == 1 else plural}"


def _advice(rank: Content) -> str:
    """Return advice for a program that ended before its goal."""
    passes = f"{_count(rank['forward_passes'], FORWARD)} and {_count(rank['backward_passes'], 'backward pass')}"
    ended = f"The program ended after {passes}, so the memory below may be less than the job needs. "
    if rank["unit"] == FORWARD:
        return ended + f"Use --forwards {rank['forward_passes'] or 1}, or --to-end to accept any number."
    if rank["completed"]:
        return ended + f"Use --steps {rank['completed']}, or give it more data, or use --to-end to accept any number."
    return ended + (
        "A step needs calls of a torch.optim.Optimizer. Use --forwards N for inference and for programs that update "
        "parameters themselves, or --to-end to accept any number."
    )


def _tables(rank: Content) -> Iterable[tuple[str, Row, list[Row]]]:
    """Return the tables of a report: titles, headings and rows."""
    yield (
        "Memory",
        ("device", "allocated", "reserved", "total", "headroom"),
        [_memory_row(device) for device in rank["devices"]],
    )
    for device in rank["devices"]:
        total = max(device["peak_allocated"], 1)
        yield (
            f"At the peak of {device['device']}",
            ("category", "bytes", "share"),
            [
                *(
                    (name, in_units(nbytes), f"{100 * nbytes / total:.1f} %")
                    for name, nbytes in sorted(device["categories"].items(), key=lambda item: -item[1])
                ),
                ("fragmentation", in_units(device["fragmentation"]), ""),
            ],
        )
        yield (
            f"Largest tensors of {device['device']}",
            ("bytes", "category", "name", "line"),
            [(in_units(one["bytes"]), one["category"], one["name"], one["line"]) for one in device["largest"][:10]],
        )
    yield (
        "Collectives",
        ("phase", "group", "ranks", "operator", "calls", "sent", "received"),
        [
            (
                row["phase"],
                row["group"],
                row["group_size"],
                row["operator"],
                row["calls"],
                in_units(row["bytes_sent"]),
                in_units(row["bytes_received"]),
            )
            for row in rank["collectives"]
        ],
    )
    if rank.get("bound"):
        yield f"Least time of operators in a {rank['unit']}", HEADINGS, [*operator_rows(rank["bound"])]
    yield (
        "Files that the program would have changed",
        ("path", "change", "bytes"),
        _file_rows(rank),
    )
    if rank["values"]:
        yield (
            "Reads of values that do not exist, and the answers",
            ("count", "answer", "policy", "line", "reader"),
            [
                (site["count"], site["answer"], site["policy"], site["line"], site["reader"])
                for site in sorted(rank["values"], key=lambda site: KINDS.index(site["kind"]))
            ],
        )


def _file_rows(rank: Content) -> list[Row]:
    rows: list[Row] = [
        (change["path"], change["change"], "" if change["change"] == "removed" else in_units(change["bytes"]))
        for change in rank["files"][:MOST_FILES]
    ]
    more = len(rank["files"]) - MOST_FILES
    return [*rows, (f"and {more} more", "", "")] if more > 0 else rows


def _memory_row(device: Content) -> Row:
    left = (
        f"{in_units(device['headroom'])} ({100 * device['headroom'] / device['total']:.1f} %)"
        if device["total"]
        else ""
    )
    total = in_units(device["total"]) if device["total"] else ""
    return device["device"], in_units(device["peak_allocated"]), in_units(device["peak_reserved"]), total, left


def _summary(rank: Content, size: int) -> list[str]:
    lines = [f"rank {rank['rank']} of {size}: {verdict(rank)}{_assumptions(rank)}"]
    if rank["flops"] is not None:
        lines.append(f"{operations(rank['flops'])} in a {rank['unit']}")
    if rank.get("bound"):  # older reports have none
        lines.append(sentence(rank["bound"], rank["unit"]))
    elif rank["flops"] is not None and rank.get("bound_error"):
        lines.append(f"The time has no bound: {rank['bound_error']}.")
    if rank["flops_error"] and rank["outcome"] != "failed":
        lines.append(f"The floating-point operations were not counted: {rank['flops_error']}.")
    if rank["outcome"] == "too few":
        lines.append(_advice(rank))
    if rank["outcome"] == USES_NO_GPU:
        lines.append(
            "The program has allocated no memory on a GPU, so it is unknown whether it fits on one. If it selects its "
            'device by a flag, pass that; the model and its inputs have to be moved to "cuda".'
        )
    if rank["out_of_memory"]:
        lines.append(rank["out_of_memory"])
    lines += rank["mismatches"]
    lines += _policies(rank)
    lines += rank["remarks"]
    return lines


def _policies(rank: Content) -> list[str]:
    """Return the policies for values that sizes depend on."""
    shapes = [site for site in rank["values"] if site["policy"] and site["kind"] in (SHAPE, INTEGER)]
    named = sorted({policy for site in shapes for policy in site["policy"].split(", ")})
    return [f"Sizes depend on {' and '.join(named)}: see --values for other policies."] if named else []


def _assumptions(rank: Content) -> str:
    """Return the numbers of assumed values, which may differ in the job."""
    counts = {kind: sum(site["count"] for site in rank["values"] if site["kind"] == kind) for kind in KINDS}
    shown = ", ".join(_count(count, kind) for kind, count in counts.items() if count)
    return f", assuming {shown}" if shown else ""


def text_report(rank: Content, size: int) -> str:
    """Return the report of one rank for a terminal. The first line is a summary."""
    parts = ["\n".join(_summary(rank, size))]
    for title, headings, rows in _tables(rank):
        if rows:
            parts.append(f"{title}\n{_text_table(headings, rows)}")
    return "\n\n".join(parts)


def _text_table(headings: Row, rows: list[Row]) -> str:
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
td, th { padding: 0.2rem 0.8rem; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
.fits { color: #176f2c; } .fails { color: #b3261e; } iframe { width: 100%; height: 42rem; border: 1px solid #ddd; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; }
"""


def html_report(report: Content) -> str:
    """Return the reports of all ranks as a self-contained HTML document."""
    size = report["world_size"]
    paragraphs = [f"<p class=fails>{html.escape(note)}</p>" for note in report["other_mismatches"]]
    body = "\n".join([*paragraphs, *(_section(rank, size) for rank in report["ranks"])])
    command = html.escape(shlex.join(report["program"]))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dry run</title><style>{STYLE}</style>"
        f"<body><h1>Dry run of {_count(size, 'rank')}</h1><pre>{command}</pre>{body}</body></html>"
    )


def html_tables(report: Content) -> str:
    """Return the reports of all ranks as HTML for a notebook, without the plots."""
    return "\n".join(part for rank in report["ranks"] for part in _parts(rank, report["world_size"]))


def _section(rank: Content, size: int) -> str:
    parts = list(_parts(rank, size))
    if rank.get("timeline"):  # older reports have no timeline
        page = html.escape(page_of(rank["timeline"]))
        parts.append(f'<h3>Memory over time</h3><iframe srcdoc="{page}"></iframe>')
    return "\n".join(parts)


def _parts(rank: Content, size: int) -> Iterator[str]:
    """Yield the summary and the tables of a rank."""
    first, *others = _summary(rank, size)
    yield f"<h2 class={'fits' if fits(rank) else 'fails'}>{html.escape(first)}</h2>"
    yield from (f"<p>{html.escape(line)}</p>" for line in others)
    if rank["error"]:
        yield f"<pre>{html.escape(rank['error'])}</pre>"
    for title, headings, rows in _tables(rank):
        if rows:
            yield f"<h3>{html.escape(title)}</h3>{_html_table(headings, rows)}"


def _html_table(headings: Row, rows: list[Row]) -> str:
    def row_of(cells: Row, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row_of(headings, 'th')}{''.join(row_of(row, 'td') for row in rows)}</table>"


# ---- Saved reports


COMMAND = "dry-run"
NEEDED = ("program", "world_size", "exit_code", "other_mismatches", "ranks")


class Report:
    """The immutable report of a dry run. Prints as the command line prints it.

    Args:
        content: The content of the JSON of `torchext dry-run --json`.

    Raises:
        ValueError: `content` is not the report of a dry run, or has another version of the schema.
    """

    __slots__ = ("_content",)

    _content: dict[str, Any]

    def __init__(self, content: Mapping[str, Any]) -> None:
        if not isinstance(content, Mapping) or content.get("command") != COMMAND:
            found = content.get("command") if isinstance(content, Mapping) else content
            raise ValueError(f"Expected a report with `command` {COMMAND!r}, got {found!r}.")
        if content.get("schema") != terminal.SCHEMA:
            raise ValueError(f"Expected a report with `schema` {terminal.SCHEMA}, got {content.get('schema')!r}.")
        missing = [key for key in NEEDED if key not in content]
        if missing:
            raise ValueError(f"The report has no {' and no '.join(f'`{key}`' for key in missing)}.")
        object.__setattr__(self, "_content", with_times_in_place(json.loads(json.dumps(content))))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A report is immutable: cannot set `{name}`.")

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return int(self._content["exit_code"])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran, in the order of the runs."""
        return tuple(rank["rank"] for rank in self._content["ranks"])

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the JSON."""
        return with_times_apart(deepcopy(self._content))

    def to_html(self) -> str:
        """Return the report of `torchext dry-run --report`: a self-contained HTML document."""
        return html_report(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self._content == other._content

    __hash__: ClassVar[None] = None  # type: ignore[assignment]

    def __str__(self) -> str:
        size = self._content["world_size"]
        texts = [text_report(rank, size) for rank in self._content["ranks"]]
        return "\n\n".join([*texts, *self._content["other_mismatches"]])

    def __repr__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) or "none"
        return f"<Report: ranks {ranks} of {self._content['world_size']}, exit code {self.exit_code}>"

    def _repr_html_(self) -> str:
        return html_tables(self._content)


def load_report(path: str | Path) -> Report:
    """Return the report that `torchext dry-run --json FILE` has written.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON, not the report of a dry run, or has another version of the schema.

    Example:
        >>> load_report("report.json")  # doctest: +SKIP
        <Report: ranks 0, 511 of 1024, exit code 0>
    """
    try:
        return Report(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        what = "The file is not JSON." if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
        raise ValueError(f"{path}: {what}") from error
