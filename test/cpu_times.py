"""Prints the CPU time of the slowest tests and of each folder: `--cpu-times`."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator

import forked
import pytest

__all__ = ["pytest_runtest_logreport", "pytest_runtest_makereport", "pytest_terminal_summary"]

SLOWEST = 30

_by_test: defaultdict[str, float] = defaultdict(float)


def _now() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4]) + forked.cpu_seconds()


_latest = 0.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU time since the last report to a report: xdist sends it to the process that prints."""
    global _latest
    report = yield
    now = _now()
    report.cpu_seconds = now - (_latest or now)  # type: ignore[attr-defined]
    _latest = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the time of a part of a test."""
    _by_test[report.nodeid] += getattr(report, "cpu_seconds", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the tables."""
    if not config.getoption("--cpu-times"):
        return
    write = terminalreporter.write_line
    terminalreporter.section("processor time")
    write(f"{'CPU s':>8}  the {SLOWEST} slowest tests")
    for name, seconds in _most(_by_test):
        write(f"{seconds:8.1f}  {name}")
    for what, depth in ("folder", 2), ("file", None):
        times: defaultdict[str, float] = defaultdict(float)
        counts: Counter[str] = Counter()
        for name, seconds in _by_test.items():
            place = "/".join(name.split("::")[0].split("/")[:depth])
            times[place] += seconds
            counts[place] += 1
        write(f"\n{'CPU s':>8} {'tests':>6}  {what}")
        for place, seconds in _most(times):
            write(f"{seconds:8.1f} {counts[place]:6}  {place}")
        write(f"{sum(times.values()):8.1f} {counts.total():6}  in all")


def _most(times: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(times.items(), key=lambda item: -item[1])[:SLOWEST]
