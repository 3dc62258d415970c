"""Reports as documents, also saved reports, from the content of the JSON report (`reports/model.py`)."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ..descriptions import INTEGER, KINDS, SHAPE
from ..internals import terminal
from ..internals.document import Code, Column, Document, Part, Picture, Table, Title, as_html, as_text
from ..internals.text import in_units
from ..memory.timeline import page_of, table_of_categories, table_of_tensors
from .model import FORWARD, USES_NO_GPU, sentence, table_of_operators, with_times_apart, with_times_in_place

__all__ = ["Report", "fits", "html_report", "load_report", "operations", "text_report", "verdict"]


# ---- Documents


Row: TypeAlias = tuple[object, ...]
Content: TypeAlias = Mapping[str, Any]

MOST_FILES = 20


def operations(flops: float) -> str:
    """Return a number of floating-point operations with its unit."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if abs(flops) < 1000:
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


def _tables(rank: Content) -> Iterator[Table]:
    sizes = (Column(name, in_units) for name in ("allocated", "reserved", "total"))
    yield Table(("device", *sizes, "headroom"), map(_memory_row, rank["devices"]), "Memory")
    for device in rank["devices"]:
        name, peak = device["device"], (device["categories"], device["peak_allocated"], device["fragmentation"])
        yield table_of_categories(*peak, f"At the peak of {name}")
        tensors = map(itemgetter("bytes", "category", "name", "line"), device["largest"][:10])
        yield table_of_tensors(tensors, f"Largest tensors of {name}")
    keys = ("phase", "group", "group_size", "operator", "calls", "bytes_sent", "bytes_received")
    sums = map(itemgetter(*keys), rank["collectives"])
    sizes = (Column(name, in_units) for name in ("sent", "received"))
    yield Table(("phase", "group", "ranks", "operator", "calls", *sizes), sums, "Collectives")
    if rank.get("bound"):
        yield table_of_operators(rank["bound"], f"Least time of operators in a {rank['unit']}")
    columns = ("path", "change", Column("bytes", in_units))
    yield Table(columns, _file_rows(rank["files"]), "Files that the program would have changed")
    names = ("count", "answer", "policy", "line", "reader")
    reads = map(itemgetter(*names), sorted(rank["values"], key=lambda site: KINDS.index(site["kind"])))
    yield Table(names, reads, "Reads of values that do not exist, and the answers")


def _memory_row(device: Content) -> Row:
    row, total = (device["device"], device["peak_allocated"], device["peak_reserved"]), device["total"]
    if not total:
        return *row, None, None
    return *row, total, f"{in_units(device['headroom'])} ({100 * device['headroom'] / total:.1f} %)"


def _file_rows(files: Sequence[Content]) -> Iterator[Row]:
    for one in files[:MOST_FILES]:
        yield one["path"], one["change"], None if one["change"] == "removed" else one["bytes"]
    if len(files) > MOST_FILES:
        yield f"and {len(files) - MOST_FILES} more", "", None


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


def _document(report: Content) -> Iterator[Part]:
    for rank in report["ranks"]:
        yield from _of_rank(rank, report["world_size"])
    yield from (Title(note, mark="fails") for note in report["other_mismatches"])


def _of_rank(rank: Content, size: int) -> Iterator[Part]:
    first, *others = _summary(rank, size)
    yield Title(first, others, "fits" if fits(rank) else "fails")
    if rank["error"]:
        yield Code(rank["error"])
    yield from _tables(rank)
    if rank.get("timeline"):  # older reports have none
        yield Picture("Memory over time", partial(page_of, rank["timeline"]))


def text_report(rank: Content, size: int) -> str:
    """Return the report of one rank for a terminal, without its error. The first line is a summary."""
    return as_text(part for part in _of_rank(rank, size) if not isinstance(part, Code))


STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; }
td, th { padding: 0.2rem 0.8rem; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top; }
.fits { color: #176f2c; } .fails { color: #b3261e; } iframe { width: 100%; height: 42rem; border: 1px solid #ddd; }
pre { background: #f6f6f6; padding: 1rem; overflow-x: auto; }
"""


def html_report(report: Content) -> str:
    """Return the reports of all ranks as a self-contained HTML document."""
    body = as_html([Code(shlex.join(report["program"])), *_document(report)])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Dry run</title><style>{STYLE}</style>"
        f"<body><h1>Dry run of {_count(report['world_size'], 'rank')}</h1>{body}</body></html>"
    )


# ---- Saved reports


COMMAND = "dry-run"
NEEDED = ("program", "world_size", "exit_code", "other_mismatches", "ranks")


class Report(Document):
    """The immutable report of a dry run. Prints as the command line prints it.

    Args:
        content: The content of the JSON of `torchext dry-run --json`.

    Raises:
        ValueError: `content` is not the report of a dry run, or has another version of the schema.
    """

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

    def __repr__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) or "none"
        return f"<Report: ranks {ranks} of {self._content['world_size']}, exit code {self.exit_code}>"

    def _parts(self) -> Iterable[Part]:
        return (part for part in _document(self._content) if not isinstance(part, Picture))


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
