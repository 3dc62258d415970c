"""The report of the command line, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ..fake.assumed_values import INTEGER, KINDS, SHAPE
from ..memory.reports import in_units
from .progress import FORWARD
from .running import DevicePeak, RankReport

__all__ = ["fits", "html_report", "text_report", "verdict"]

Row = Sequence[object]

MOST_FILES = 20


def operations(flops: float) -> str:
    """Return a number of floating-point operations with its unit."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if flops < 1000:
            return f"{flops:.3g} {unit}"
        flops /= 1000
    return f"{flops:.4g} PFLOP"


def fits(report: RankReport) -> bool:
    """Return true if the rank fits and has reached its goal."""
    return report.outcome == "fits"


def verdict(report: RankReport) -> str:
    """Return the outcome of a rank, the number of its steps, and its duration."""
    if report.exit_code and not (report.error or report.mismatches):
        outcome = f"the program exited with code {report.exit_code},"
    else:
        outcome = {"failed": "the program failed,", "too few": "ended after"}.get(report.outcome, f"{report.outcome},")
    return f"{outcome} {_amount(report)} in {report.seconds:.1f} s"


def _amount(report: RankReport) -> str:
    if report.goal.count is None:
        return f"{_count(report.made, report.goal.unit)} to its end"
    return f"{report.made} of {_count(report.goal.count, report.goal.unit)}"


def _count(number: int, unit: str) -> str:
    plural = unit + ("es" if unit.endswith("s") else "s")
    return f"{number} {unit if number == 1 else plural}"


def _advice(report: RankReport) -> str:
    """Return advice for a program that ended before its goal."""
    passes = f"{_count(report.forwards, FORWARD)} and {_count(report.backwards, 'backward pass')}"
    ended = f"The program ended after {passes}, so the memory below may be less than the job needs. "
    if report.goal.unit == FORWARD:
        return ended + f"Use --forwards {report.forwards or 1}, or --to-end to accept any number."
    if report.made:
        return ended + f"Use --steps {report.made}, or give it more data, or use --to-end to accept any number."
    return ended + (
        "A step needs calls of a torch.optim.Optimizer. Use --forwards N for inference and for programs that update "
        "parameters themselves, or --to-end to accept any number."
    )


def _tables(report: RankReport) -> Iterable[tuple[str, Row, list[Row]]]:
    """Return the tables of a report: titles, headings and rows."""
    yield (
        "Memory",
        ("device", "allocated", "reserved", "total", "headroom"),
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
            ("bytes", "category", "name", "line"),
            [(in_units(size), category, title, line) for size, category, title, line in peak.largest[:10]],
        )
    yield (
        "Collectives",
        ("phase", "group", "ranks", "operator", "calls", "sent", "received"),
        [
            (
                row.phase,
                row.group,
                row.group_size,
                row.operator,
                row.calls,
                in_units(row.bytes_sent),
                in_units(row.bytes_received),
            )
            for row in report.collectives
        ],
    )
    yield (
        "Files that the program would have changed",
        ("path", "change", "bytes"),
        _file_rows(report),
    )
    if report.values:
        yield (
            "Reads of values that do not exist, and the answers",
            ("count", "answer", "policy", "line", "reader"),
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
    lines = [f"rank {report.rank} of {size}: {verdict(report)}{_assumptions(report)}"]
    if report.flops is not None:
        lines.append(f"{operations(report.flops)} in a {report.goal.unit}")
    if report.flops_error:
        lines.append(f"The floating-point operations were not counted: {report.flops_error}.")
    if report.outcome == "too few":
        lines.append(_advice(report))
    if report.out_of_memory:
        lines.append(report.out_of_memory)
    lines += report.mismatches
    lines += _policies(report)
    lines += report.remarks
    return lines


def _policies(report: RankReport) -> list[str]:
    """Return the policies for values that sizes depend on."""
    shapes = [site for site in report.values if site.policy and site.kind in (SHAPE, INTEGER)]
    named = sorted({policy for site in shapes for policy in site.policy.split(", ")})
    return [f"Sizes depend on {' and '.join(named)}: see --values for other policies."] if named else []


def _assumptions(report: RankReport) -> str:
    """Return the numbers of assumed values, which may differ in the job."""
    counts = {kind: sum(site.count for site in report.values if site.kind == kind) for kind in KINDS}
    shown = ", ".join(_count(count, kind) for kind, count in counts.items() if count)
    return f", assuming {shown}" if shown else ""


def text_report(report: RankReport, size: int) -> str:
    """Return the report of one rank for a terminal. The first line is a summary."""
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


def html_report(reports: Sequence[RankReport], size: int, command: str, notes: Sequence[str] = ()) -> str:
    """Return the reports of all ranks as a self-contained HTML document; `notes` are about other ranks."""
    paragraphs = [f"<p class=fails>{html.escape(note)}</p>" for note in notes]
    body = "\n".join([*paragraphs, *(_section(report, size) for report in reports)])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dry run</title><style>{STYLE}</style>"
        f"<body><h1>Dry run of {_count(size, 'rank')}</h1><pre>{html.escape(command)}</pre>{body}</body></html>"
    )


def _section(report: RankReport, size: int) -> str:
    first, *others = _summary(report, size)
    state = "fits" if fits(report) else "fails"
    parts = [f"<h2 class={state}>{html.escape(first)}</h2>", *(f"<p>{html.escape(line)}</p>" for line in others)]
    if report.error:
        parts.append(f"<pre>{html.escape(report.error)}</pre>")
    for title, headings, rows in _tables(report):
        if rows:
            parts.append(f"<h3>{html.escape(title)}</h3>{_html_table(headings, rows)}")
    if report.memory_html:
        parts.append(f'<h3>Memory over time</h3><iframe srcdoc="{html.escape(report.memory_html)}"></iframe>')
    return "\n".join(parts)


def _html_table(headings: Row, rows: list[Row]) -> str:
    def row_of(cells: Row, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row_of(headings, 'th')}{''.join(row_of(row, 'td') for row in rows)}</table>"
