"""The report of the command line, as text and as a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ..fake.assumed_values import INTEGER, KINDS, SHAPE
from ..memory.reports import in_units
from .progress import FORWARD
from .running import DevicePeak, RankReport

__all__ = ["page_of", "text_of"]

Row = Sequence[object]

MOST_FILES = 20


def operations(flops: float) -> str:
    """The floating-point operations in the unit that suits."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if flops < 1000:
            return f"{flops:.3g} {unit}"
        flops /= 1000
    return f"{flops:.4g} PFLOP"


FITS = "fits"


def verdict(report: RankReport) -> str:
    """Whether the rank fits, and how much it has made."""
    made = _amount(report)
    if report.error or report.mismatches:
        return f"the program has failed, {made}"
    if report.exit_code:
        return f"the program has ended with code {report.exit_code}, {made}"
    if report.out_of_memory:
        return f"does not fit, {made}"
    return f"{FITS}, {made}" if report.has_enough else f"ended after {made}"


def _amount(report: RankReport) -> str:
    if report.goal.count is None:
        return f"{_count(report.made, report.goal.unit)} to its end"
    return f"{report.made} of {_count(report.goal.count, report.goal.unit)}"


def _count(number: int, unit: str) -> str:
    plural = unit + ("es" if unit.endswith("s") else "s")
    return f"{number} {unit if number == 1 else plural}"


def _advice(report: RankReport) -> str:
    """What to do about a program that has ended before it has made enough."""
    passes = f"{_count(report.forwards, FORWARD)} and {_count(report.backwards, 'backward pass')}"
    ended = f"The program ended by itself after {passes}, so the memory below may be less than the job needs. "
    if report.goal.unit == FORWARD:
        return ended + f"Use --forwards {report.forwards or 1}, or --to-end to accept what it does."
    if report.made:
        return ended + f"Use --steps {report.made}, or give it more data; --to-end accepts what it does."
    return ended + (
        "A step needs calls of a torch.optim.Optimizer. Use --forwards N for inference and for programs that update "
        "parameters themselves, or --to-end to accept what it does."
    )


def _tables(report: RankReport) -> Iterable[tuple[str, Row, list[Row]]]:
    """Titles, headings and rows."""
    yield (
        "Memory",
        ("device", "allocated", "reserved", "of", "headroom"),
        [_memory_row(peak) for peak in report.peaks],
    )
    for peak in report.peaks:
        total = max(peak.allocated, 1)
        yield (
            f"At the peak of {peak.device}",
            ("category", "bytes", "share"),
            [
                *(
                    (name, in_units(nbytes), f"{100 * nbytes / total:.1f} %")
                    for name, nbytes in sorted(peak.by_category.items(), key=lambda item: -item[1])
                ),
                ("fragmentation", in_units(peak.fragmentation), ""),
            ],
        )
        yield (
            f"Largest tensors of {peak.device}",
            ("bytes", "category", "what", "line"),
            [(in_units(size), category, title, line) for size, category, title, line in peak.largest[:10]],
        )
    yield (
        "Collectives",
        ("phase", "group", "ranks", "operator", "calls", "given", "received"),
        [
            (
                row.phase,
                row.group,
                row.group_size,
                row.operator,
                row.calls,
                in_units(row.bytes_in),
                in_units(row.bytes_out),
            )
            for row in report.collectives
        ],
    )
    yield (
        "Files that the program would have changed",
        ("path", "what", "bytes"),
        _file_rows(report),
    )
    if report.values:
        yield (
            "Values that do not exist, and what the program was told",
            ("times", "answer", "policy", "line", "reader"),
            [
                (site.count, site.answer, site.policy, site.line, site.reader)
                for site in sorted(report.values, key=lambda site: KINDS.index(site.kind))
            ],
        )


def _file_rows(report: RankReport) -> list[Row]:
    rows: list[Row] = [
        (change.path, change.what, "" if change.what == "removed" else in_units(change.nbytes))
        for change in report.files[:MOST_FILES]
    ]
    more = len(report.files) - MOST_FILES
    return [*rows, (f"and {more} more", "", "")] if more > 0 else rows


def _memory_row(peak: DevicePeak) -> Row:
    left = f"{in_units(peak.headroom)} ({100 * peak.headroom / peak.total:.1f} %)" if peak.total else ""
    total = in_units(peak.total) if peak.total else ""
    return peak.device, in_units(peak.allocated), in_units(peak.reserved), total, left


def _summary(report: RankReport, size: int) -> list[str]:
    lines = [f"rank {report.rank} of {size}: {verdict(report)} in {report.seconds:.1f} s{_assumptions(report)}"]
    if report.flops is not None:
        lines.append(f"{operations(report.flops)} in a {report.goal.unit}")
    if report.flops_error:
        lines.append(f"The floating-point operations were not counted: {report.flops_error}.")
    if not report.has_enough and verdict(report).startswith("ended"):
        lines.append(_advice(report))
    if report.out_of_memory:
        lines.append(report.out_of_memory)
    lines += report.mismatches
    lines += _policies(report)
    lines += report.remarks
    return lines


def _policies(report: RankReport) -> list[str]:
    """What sizes stand on that other policies would change."""
    shapes = [site for site in report.values if site.policy and site.kind in (SHAPE, INTEGER)]
    named = sorted({policy for site in shapes for policy in site.policy.split(", ")})
    return [f"Sizes stand on {' and '.join(named)}: see --values for other policies."] if named else []


def _assumptions(report: RankReport) -> str:
    """What the program was led by that may be otherwise in the job."""
    counts = {kind: sum(site.count for site in report.values if site.kind == kind) for kind in KINDS}
    shown = ", ".join(_count(count, kind) for kind, count in counts.items() if count)
    return f", assuming {shown}" if shown else ""


def text_of(report: RankReport, size: int) -> str:
    """The report of one rank for a terminal."""
    parts = ["\n".join(_summary(report, size))]
    for title, headings, rows in _tables(report):
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


def page_of(reports: Sequence[RankReport], size: int, command: str, notes: Sequence[str] = ()) -> str:
    """The reports of all ranks as one page, which needs nothing else; `notes` are about other ranks."""
    paragraphs = [f"<p class=fails>{html.escape(note)}</p>" for note in notes]
    body = "\n".join([*paragraphs, *(_section(report, size) for report in reports)])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dry run</title><style>{STYLE}</style>"
        f"<body><h1>Dry run of {size} processes</h1><pre>{html.escape(command)}</pre>{body}</body></html>"
    )


def _section(report: RankReport, size: int) -> str:
    first, *others = _summary(report, size)
    state = "fits" if verdict(report).startswith(FITS) else "fails"
    parts = [f"<h2 class={state}>{html.escape(first)}</h2>", *(f"<p>{html.escape(line)}</p>" for line in others)]
    if report.error:
        parts.append(f"<pre>{html.escape(report.error)}</pre>")
    for title, headings, rows in _tables(report):
        if rows:
            parts.append(f"<h3>{html.escape(title)}</h3>{_html_table(headings, rows)}")
    if report.page:
        parts.append(f'<h3>Memory over time</h3><iframe srcdoc="{html.escape(report.page)}"></iframe>')
    return "\n".join(parts)


def _html_table(headings: Row, rows: list[Row]) -> str:
    def row_of(cells: Row, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row_of(headings, 'th')}{''.join(row_of(row, 'td') for row in rows)}</table>"
