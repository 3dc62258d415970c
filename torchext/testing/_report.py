"""Reports of comparisons: a table for readers, JSON for programs."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from ._comparison import Comparison
from ._suite import Outcome, SuiteRun

__all__ = ["lines_of", "write_json"]

_COLUMNS = (
    "file",
    "tests",
    "pass without",
    "compared",
    "pass",
    "differ",
    "unstable",
    "fails in control run",
    "skipped",
)


def lines_of(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the table, and those about differing tests."""
    yield from _aligned(_table(comparison))
    for title, tests in (
        ("unstable: they also failed without torchext when they were run again", comparison.unstable),
        (
            "fails in control run: they fail with pass-through wrappers of PyTorch functions",
            comparison.by_replacing,
        ),
        (f"different: they pass without torchext, but not in mode {comparison.mode}", comparison.differences),
    ):
        if tests:
            yield f"{title}:"
            yield from (_line_of(nodeid, outcome) for nodeid, outcome in tests.items())
    if comparison.run.trouble:
        yield comparison.run.trouble


def _line_of(nodeid: str, outcome: Outcome) -> str:
    return f"  {nodeid}: {outcome.outcome}{': ' if outcome.error else ''}{outcome.error}"


def _table(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    compared, differing = comparison.compared, comparison.differences
    counts = [
        _by_file(comparison.baseline.outcomes),
        _by_file(nodeid for nodeid, outcome in comparison.baseline.outcomes.items() if outcome.is_good),
        _by_file(compared),
        _by_file(nodeid for nodeid in compared if nodeid not in differing),
        _by_file(differing),
        _by_file(comparison.unstable),
        _by_file(comparison.by_replacing),
        _by_file(comparison.skipped),
    ]
    yield _COLUMNS
    for file in counts[0]:
        yield file, *(str(count[file]) for count in counts)
    if len(counts[0]) > 1:
        yield "all", *(str(count.total()) for count in counts)


def _by_file(nodeids: Iterable[str]) -> Counter[str]:
    return Counter(nodeid.partition("::")[0] for nodeid in nodeids)


def _aligned(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *counts in rows:
        yield "  ".join([name.ljust(widths[0]), *map(str.rjust, counts, widths[1:])]).rstrip()


def write_json(path: Path, arguments: list[str], baseline: SuiteRun, comparisons: Iterable[Comparison]) -> None:
    """Write all results to `path`."""
    comparisons = list(comparisons)
    report = {
        "arguments": arguments,
        "versions": {
            "python": platform.python_version(),
            "pytest": pytest.__version__,
            **{name: _version_of(name) for name in ("torch", "torchext")},
        },
        "baseline": {
            "outcomes": _in_short(baseline),
            "failures": _in_full({nodeid: each for nodeid, each in baseline.outcomes.items() if each.error}),
            "collection_errors": _in_full(baseline.collection_errors),
            "trouble": baseline.trouble,
        },
        "modes": {each.mode: _mode_in_json(each) for each in comparisons},
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _mode_in_json(comparison: Comparison) -> dict[str, object]:
    return {
        "compared": len(comparison.compared),
        "passed": len(comparison.compared) - len(comparison.differences),
        "differences": _in_full(comparison.differences),
        "unstable": _in_full(comparison.unstable),
        "by_replacing": _in_full(comparison.by_replacing),
        "skipped": comparison.skipped,
        "outcomes": _in_short(comparison.run),
        "trouble": comparison.run.trouble,
    }


def _in_short(run: SuiteRun) -> dict[str, str]:
    return {nodeid: outcome.outcome for nodeid, outcome in run.outcomes.items()}


def _in_full(outcomes: dict[str, Outcome]) -> dict[str, dict[str, str]]:
    return {nodeid: outcome._asdict() for nodeid, outcome in outcomes.items()}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # built in place
        return "unknown"
