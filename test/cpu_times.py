"""The CPU time of tests: the slowest ones and each folder (`--cpu-times`), and the budget of the everyday suite.

The setting `everyday_cpu_seconds` in pyproject.toml is the budget. A run of the whole everyday suite writes its CPU
time to `RECORD`, which a test of `make ci` compares with the budget, and prints the tables if it exceeds the budget.

The same suite takes up to three times as long on another machine, or beside other processes. Therefore a fixed
computation is timed between tests, in the same processes, and the budget is in seconds of a machine on which this
computation takes `REFERENCE_SECONDS`.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import forked
import processes
import pytest
import tiers
import torch

__all__ = [
    "RECORD",
    "budget",
    "pytest_addoption",
    "pytest_runtest_logreport",
    "pytest_runtest_makereport",
    "pytest_sessionstart",
    "pytest_terminal_summary",
]

SLOWEST = 30
BEFORE_TESTS = "imports, collection and the first part of the first test, in all processes"
RECORD = Path(__file__).parents[1] / "build" / "everyday_cpu_time.json"

REFERENCE_SECONDS = 0.0035
TESTS_PER_REFERENCE = 50

_by_test: defaultdict[str, float] = defaultdict(float)
_references: list[float] = []


def _now() -> float:
    """Return the CPU time of this process, of its children, and of the programs that others forked for it."""
    return sum(os.times()[:4]) + forked.cpu_seconds() + processes.cpu_seconds()


def _reference() -> float:
    """Return the CPU time of a fixed computation, half in the interpreter and half in PyTorch."""
    start = time.thread_time()
    words = Counter(str(number)[::-1] for number in range(4000))
    sorted(words, key=words.__getitem__)
    numbers = torch.arange(64)
    for _ in range(500):
        numbers = (numbers + 1).view(8, 8).t().flatten()
    return time.thread_time() - start


_latest = 0.0
_tests = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU time since the last report to a report: xdist sends it to the process that prints."""
    global _latest, _tests
    report = yield
    now = _now()
    report.cpu_seconds = (BEFORE_TESTS, now) if not _latest else (report.nodeid, now - _latest)  # type: ignore[attr-defined]
    if report.when == "teardown":
        if _tests % TESTS_PER_REFERENCE == 0:
            report.reference = _reference()  # type: ignore[attr-defined]
        _tests += 1
    _latest = _now()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count the time of a part of a test."""
    name, seconds = getattr(report, "cpu_seconds", (report.nodeid, 0.0))
    _by_test[name] += seconds
    if (reference := getattr(report, "reference", None)) is not None:
        _references.append(reference)


def _scaled_total() -> float:
    """Return the CPU time that all tests would take on the machine of the budget."""
    return sum(_by_test.values()) * REFERENCE_SECONDS / statistics.median(_references or [REFERENCE_SECONDS])


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the setting."""
    parser.addoption(
        "--cpu-times", action="store_true", help="print the processor time of the slowest tests, and of each folder"
    )
    parser.addini("everyday_cpu_seconds", "the CPU time that the everyday suite may take", default="0")


def budget(config: pytest.Config) -> float:
    """Return the CPU time in seconds that the everyday suite may take on the machine of the budget."""
    return float(config.getini("everyday_cpu_seconds"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remove the record of an earlier run, which may have been of other sources."""
    if tiers.is_whole_everyday_suite(session.config):
        RECORD.unlink(missing_ok=True)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    """Record the time of the everyday suite if it passed. Print the tables if requested."""
    total = _scaled_total()
    is_everyday = exitstatus == pytest.ExitCode.OK and tiers.is_whole_everyday_suite(config)
    if is_everyday:
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps({"seconds": round(total), "choice": config.option.choice}))
    if config.getoption("--cpu-times") or (is_everyday and total > budget(config)):
        _print_tables(terminalreporter)
    if is_everyday and total > budget(config):
        terminalreporter.write_line(
            f"The everyday suite takes {total:.0f} s on the machine of the budget, which is {budget(config):.0f} s."
        )


def _print_tables(terminalreporter: pytest.TerminalReporter) -> None:
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
