"""Runs a suite in separate processes until each test has run or has ended its process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .child import torchext_recorder
from .child.torchext_recorder import Job

__all__ = ["Outcome", "Suite", "SuiteRun"]

# From bad to good. A test has the worst outcome of its parts.
_OUTCOMES = ("crashed", "timed out", "failed", "error", "passed", "xpassed", "xfailed", "skipped")


class Outcome(NamedTuple):
    """The outcome of a test."""

    outcome: str
    """`passed`, `xfailed`, `xpassed`, `skipped`, `failed`, `error`, `crashed` or `timed out`."""
    error: str = ""
    """The first line of its error."""
    text: str = ""
    """Pytest's full error report."""

    @property
    def is_good(self) -> bool:
        """Whether the test has run with the expected result."""
        return self.outcome in ("passed", "xpassed", "xfailed")


@dataclass
class SuiteRun:
    """The outcomes of a suite."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """By node id, in the order in which the tests were run."""
    collection_errors: dict[str, Outcome] = field(default_factory=dict)
    """By the node id of the item that could not be collected, usually a file."""
    exit_code: int = 0
    """pytest's exit code if it indicates a usage or internal error; otherwise 0."""
    trouble: str = ""
    """The error of a process that ran no test at the time."""
    was_stopped: bool = False
    """Whether the run was stopped because of the number of failures."""

    def add(self, nodeid: str, outcome: Outcome) -> None:
        """Add the outcome of a part of a test."""
        known = self.outcomes.get(nodeid, outcome)
        self.outcomes[nodeid] = min(known, outcome, key=lambda each: _OUTCOMES.index(each.outcome))

    def count_bad(self) -> int:
        """Return the number of tests that have failed in any way."""
        return sum(not outcome.is_good and outcome.outcome != "skipped" for outcome in self.outcomes.values())


@dataclass
class Suite:
    """A suite, and how to run it."""

    arguments: list[str]
    """The arguments for pytest."""
    folder: str
    """The working directory."""
    is_module_call: bool = False
    """Run like `python -m pytest`."""
    timeout: float = 0
    """Time limit for each test in seconds; 0 for no limit."""

    def run(
        self,
        mode: str | None = None,
        only: Sequence[str] | None = None,
        *,
        is_control: bool = False,
        stop_after: int = 0,
    ) -> SuiteRun:
        """Run the suite. When a test ends the process, another process runs the remaining tests.

        Args:
            mode: One of MODES, or None to run without torchext.
            only: The node ids of the tests to run; by default all that pytest collects.
            is_control: See `Job`.
            stop_after: Number of failures, crashes and timeouts that ends the run; 0 for no limit.
        """
        run = SuiteRun()
        left = None if only is None else list(only)
        while left is None or left:
            with tempfile.TemporaryDirectory(prefix="torchext_suite_") as folder:
                may_fail = stop_after and stop_after - run.count_bad()
                job = Job(folder, mode, is_control, left, self.timeout, may_fail, self.is_module_call)
                left = self._run_process(job).add_to(run)
            # A process counts its own failures, but not the test that ends it.
            if 0 < stop_after <= run.count_bad():
                run.was_stopped = True
                break
        return run

    def _run_process(self, job: Job) -> _Process:
        command = [sys.executable, *_interpreter_flags(), torchext_recorder.__file__, *self.arguments]
        # Sets of strings then have the same order in each process, and so have tests that are generated from them.
        status = _status_of(command, self.folder, {"PYTHONHASHSEED": "0", **os.environ, **job.environment()})
        return _Process(status, job)


class _Process:
    """The results of a process that has run tests, or was ended by one."""

    def __init__(self, status: int, job: Job) -> None:
        self.status = status
        self.collected = job.only
        self.running: dict[str, None] = {}
        self.parts: list[tuple[str, Outcome]] = []
        self.collection_errors: dict[str, Outcome] = {}
        self.end: int | None = None
        self.was_stopped = False
        self.timed_out = set(filter(None, map(_who_timed_out, Path(job.folder).glob("clock.*"))))
        records = Path(job.folder, "records.jsonl")
        for line in records.read_text().splitlines() if records.exists() else ():
            self._read(**json.loads(line))

    def _read(self, kind: str, **content: Any) -> None:
        if kind == "collected":
            self.collected = content["ids"]
        elif kind == "collection":
            self.collection_errors[content["id"]] = Outcome("error", content["error"], content["text"])
        elif kind == "start":
            self.running[content["id"]] = None
        elif kind == "report":
            self.parts.append((content.pop("id"), Outcome(**content)))
        elif kind == "finish":
            self.running.pop(content["id"], None)
        elif kind == "stopped":
            self.was_stopped = True
        elif kind == "end":
            self.end = content["status"]

    def add_to(self, run: SuiteRun) -> list[str] | None:
        """Add the results to those of the suite, and return the node ids of the remaining tests."""
        run.collection_errors |= self.collection_errors
        run.was_stopped |= self.was_stopped
        for nodeid, outcome in self.parts:
            run.add(nodeid, self._without_worker(nodeid, outcome))
        if self.end is not None:
            self._tell_the_end(run)
            return []
        for nodeid in self.running:
            run.add(nodeid, self._last_words(nodeid))
        left = [nodeid for nodeid in self.collected or () if nodeid not in run.outcomes]
        if self.parts or self.running:
            return left
        self._tell_no_test_was_run(run)
        return []

    def _without_worker(self, nodeid: str, outcome: Outcome) -> Outcome:
        """Return the outcome if a worker of xdist timed out: xdist reports only that the worker has ended."""
        is_late = outcome.outcome == "crashed" and nodeid in self.timed_out
        return outcome._replace(outcome="timed out") if is_late else outcome

    def _last_words(self, nodeid: str) -> Outcome:
        if nodeid in self.timed_out:
            return Outcome("timed out", "the test exceeded its time limit, and its process was ended")
        return Outcome("crashed", f"the process {_ending(self.status)}")

    def _tell_the_end(self, run: SuiteRun) -> None:
        if self.status < 0:
            run.trouble = f"After the last test the process {_ending(self.status)}."
        if not self.was_stopped and self.end not in (0, 1):
            run.exit_code = self.end or 0
            run.trouble = run.trouble or f"pytest ended with exit code {self.end}."

    def _tell_no_test_was_run(self, run: SuiteRun) -> None:
        run.trouble = f"Before the first test the process {_ending(self.status)}."
        run.exit_code = self.status if self.status in (2, 4, 5) else 3


def _who_timed_out(clock: Path) -> str | None:
    """Return the node id of the test that timed out in the process that has left `clock`, or None."""
    nodeid, _, traceback = clock.read_text().partition("\n")
    return nodeid if "Timeout" in traceback else None


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _interpreter_flags() -> list[str]:
    """Return the flags of this interpreter, such as `-W error`."""
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return flags


def _status_of(command: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run a command to its end, and end the processes that it has left."""
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.wait(10)
        raise
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
