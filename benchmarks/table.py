"""Measure every row of docs/reference/speed.md, and compare it with the ones that are stored.

    python benchmarks/table.py [GROUP ...]          # measure the given groups (default: all), and compare
    python benchmarks/table.py --save [GROUP ...]   # also store the rows, if none is slower, and write the page
    python benchmarks/table.py --accept [GROUP ...] # store them even if some are slower
    python benchmarks/table.py --check              # exit with 1 if the page differs from docs/reference/speed.json

A row is a ratio of two costs that are measured alternately, so that it depends little on the machine. Its noise is the
range of its middle half. A row is a regression if its median exceeds the stored one by more than 15 %, and the two
ranges do not overlap. Regressions, and stored rows that were not measured, are named, and the exit code is 1. Each
group runs in its own process.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import multiprocessing
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the processes of groups import the scripts

from benchmarks.headline import hardware
from benchmarks.rounds import GROUPS, Sample

STORED = Path(__file__).parents[1] / "docs" / "reference" / "speed.json"
PAGE = STORED.with_suffix(".md")
TOLERANCE = 1.15


@dataclass(frozen=True)
class Row:
    """A measured row: medians, and the middle half of the ratios of its rounds."""

    group: str
    ours: float
    """Seconds, or bytes."""
    ratio: float
    low: float
    high: float
    limit: float | None
    """The physical limit, as a ratio to the peer."""
    at_most: float | None
    stamp: str

    def is_worse_than(self, stored: Row) -> bool:
        """Return whether this row is slower than `stored`, beyond the noise of both."""
        return self.ratio > TOLERANCE * stored.ratio and self.low > stored.high


def stamp() -> str:
    """Return the date, the hardware and the versions."""
    today = dt.datetime.now(tz=dt.timezone.utc).date().isoformat()
    return f"{today}; {hardware()}; torch {torch.__version__}, Python {platform.python_version()}"


def samples_of(group: str, rounds: int) -> list[Sample]:
    """Measure a group, after one round that warms up."""
    measure = GROUPS[group]()
    list(measure())
    return [sample for _ in range(rounds) for sample in measure()]


def row_of(group: str, samples: list[Sample]) -> Row:
    """Summarize the measurements of one row of a group."""
    ratios = [sample.ours / sample.peer for sample in samples]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    limits = [sample.limit / sample.peer for sample in samples if sample.limit is not None]
    return Row(
        group=group,
        ours=_rounded(statistics.median(sample.ours for sample in samples)),
        ratio=_rounded(middle),
        low=_rounded(low),
        high=_rounded(high),
        limit=_rounded(statistics.median(limits)) if limits else None,
        at_most=samples[0].at_most,
        stamp=stamp(),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def measured(groups: list[str], rounds: int) -> Iterator[tuple[str, Row]]:
    """Measure the rows of the groups, each group in its own process."""
    for group in groups:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(samples_of, group, rounds).result()
        by_row = defaultdict(list)
        for sample in found:
            by_row[sample.row].append(sample)
        yield from ((name, row_of(group, samples)) for name, samples in by_row.items())


def regressions(rows: Mapping[str, Row], stored: Mapping[str, Row]) -> list[str]:
    """Return a line for each row that is slower than the stored one, beyond noise."""
    return [
        f"{name}: {row.ratio} ({row.low} to {row.high}), stored {stored[name].ratio} "
        f"({stored[name].low} to {stored[name].high}; {stored[name].stamp})"
        for name, row in rows.items()
        if name in stored and row.is_worse_than(stored[name])
    ]


def cells(name: str, row: Row) -> list[str]:
    """Return the columns of a row."""
    ours = f"{row.ours / 2**20:.1f} MiB" if "bytes" in name else _duration(row.ours)
    limit = "" if row.limit is None else f"{row.limit:.3g}"
    bar = "" if row.at_most is None else f"{row.at_most:.3g}"
    return [name, ours, f"{row.ratio:.3g}", f"{row.low:.3g} to {row.high:.3g}", limit, bar]


def _duration(seconds: float) -> str:
    power = min(3, max(0, math.ceil(-math.log10(seconds) / 3)))
    return f"{seconds * 1000**power:.3g} {('s', 'ms', 'us', 'ns')[power]}"


def page(stored: Mapping[str, Row]) -> str:
    """Return the text of docs/reference/speed.md."""
    lines = [
        "# Speed",
        "",
        "`make bench` measures these rows and names those that became slower by more than 15 %, beyond noise.",
        "`python benchmarks/table.py --save` stores them and writes this page.",
        "",
        "A ratio is the cost of torchext divided by the cost of the alternative that the row names after `by`. It is",
        "the median of rounds that measure both alternately; the range is the middle half of the rounds. The limit is",
        "the least cost on this hardware, also divided by the cost of the alternative.",
        "",
    ]
    for mark in dict.fromkeys(row.stamp for row in stored.values()):
        lines += [f"Measured {mark}:", "", "| row | torchext | ratio | range | limit | target |"]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        lines += [f"| {' | '.join(cells(name, row))} |" for name, row in stored.items() if row.stamp == mark] + [""]
    return "\n".join(lines)


def main() -> None:
    """Measure and compare, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"one of {', '.join(GROUPS)}")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each row")
    parser.add_argument(
        "--save", action="store_true", help="store the rows and write the page, if no row is slower or missing"
    )
    parser.add_argument("--accept", action="store_true", help="store the rows and write the page")
    parser.add_argument("--check", action="store_true", help="only compare the page with the stored rows")
    options = parser.parse_args()
    if unknown := set(options.groups) - GROUPS.keys():
        parser.error(f"unknown groups: {', '.join(sorted(unknown))}; expected some of {', '.join(GROUPS)}")
    stored = {name: Row(**row) for name, row in json.loads(STORED.read_text()).items()} if STORED.exists() else {}
    if options.check:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == page(stored) else f"Run `python {sys.argv[0]} --save`.")
    print(f"{stamp()}\n{'':78}{'torchext':>10}{'ratio':>8}{'range':>18}{'limit':>8}{'target':>8}")
    groups = options.groups or list(GROUPS)
    rows = {}
    for name, row in measured(groups, options.rounds):
        rows[name] = row
        title, ours, ratio, noise, limit, bar = cells(name, row)
        print(f"{title:78}{ours:>10}{ratio:>8}{noise:>18}{limit:>8}{bar:>8}", flush=True)
    slower = regressions(rows, stored)
    missing = [f"  {name}" for name, row in stored.items() if row.group in groups and name not in rows]
    if options.accept or (options.save and not slower and not missing):
        measured_groups = {row.group for row in rows.values()}
        stored = {name: row for name, row in stored.items() if row.group not in measured_groups} | rows
        STORED.write_text(json.dumps({name: asdict(row) for name, row in stored.items()}, indent=2) + "\n")
        PAGE.write_text(page(stored))
    problems = {
        "Slower than stored by more than 15 %, beyond noise": slower,
        "Stored, but not measured": [] if options.accept else missing,
    }
    if texts := ["\n".join(["", f"{problem}:", *names]) for problem, names in problems.items() if names]:
        sys.exit("\n".join(texts))


if __name__ == "__main__":
    main()
