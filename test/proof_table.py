"""Prints the passed tests on this machine's GPU, as rows of the table in docs/reference/proof.md: `--proof-table`."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
import torch

__all__ = ["pytest_terminal_summary"]

COLUMNS = ("passed", "failed", "skipped")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print a row for each file."""
    if not config.getoption("--proof-table"):
        return
    write = terminalreporter.write_line
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for outcome in (*COLUMNS, "error"):
        for report in terminalreporter.getreports(outcome):
            counts[report.nodeid.split("::")[0].removeprefix("test/")]["failed" if outcome == "error" else outcome] += 1
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    terminalreporter.section("for docs/reference/proof.md")
    write(f"{device}, torch {torch.__version__}\n")
    write("| file | passed | failed | skipped |\n| --- | ---: | ---: | ---: |")
    for file, of_file in sorted(counts.items()):
        write(f"| `{file}` | " + " | ".join(str(of_file[outcome]) for outcome in COLUMNS) + " |")
