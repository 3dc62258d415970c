"""Runs pytest once, as a job file from `plugin` specifies, and records the outcome of each test immediately.

`plugin` starts this file as a script in its own process, which a test may end in any way. Workers of xdist import it.
It needs only pytest: the baseline processes must not import torchext, because they provide the results without it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Generator, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pytest

__all__ = ["MODES", "Job", "Mode", "main", "pytest_addoption", "pytest_configure"]


class Mode(NamedTuple):
    """A way to run a suite with torchext. A function in `torchext/testing/modes.py` implements it."""

    text: str
    """The description in the help text."""
    has_control: bool = False
    """Whether it replaces functions. A control run replaces them by pass-through wrappers."""


MODES = {
    "installed": Mode("every feature of torchext has been used once, no PyTorch function is replaced"),
    "deferred": Mode("modules that tests construct are deferred, and materialized immediately", has_control=True),
    "deferred-factories": Mode("also tensors from torch.ones() and similar functions", has_control=True),
    "inference": Mode("torch.inference_mode is torchext's"),
    "autocast": Mode("torch.autocast enters and leaves torchext's regions"),
    "fake": Mode("FakeTensorMode, where tests use it, is torchext's fake_mode"),
}

_JOB = "TORCHEXT_SUITE_JOB"  # the environment variable with the path of the file
_PLUGIN = "torchext.testing.plugin"
_LONGEST_TEXT = 20_000


class Job(NamedTuple):
    """The work of a process, passed as JSON."""

    folder: str
    """The output folder: `records.jsonl`, and a file about timeouts for each process that runs tests."""
    mode: str | None = None
    """One of MODES, or None for the baseline."""
    is_control: bool = False
    """Replace the mode's functions by pass-through wrappers."""
    only: list[str] | None = None
    """The node ids of the tests to run, in order; None for all that pytest collects."""
    timeout: float = 0
    """Time limit for each test in seconds; 0 for no limit."""
    stop_after: int = 0
    """Number of failures that ends the run; 0 for no limit."""
    cwd_on_path: bool = False
    """Put the working directory on `sys.path`, as `python -m pytest` does."""

    @classmethod
    def from_environment(cls) -> Job:
        """Read the job of this process."""
        return cls(**json.loads(Path(os.environ[_JOB]).read_text()))

    def environment(self) -> dict[str, str]:
        """Write the job, and return the additional environment variables of the process."""
        path = Path(self.folder, "job.json")
        path.write_text(json.dumps(self._asdict()))
        return {_JOB: str(path)}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("torchext", "torchext: does it break this suite?")
    group.addoption(
        "--torchext",
        metavar="MODES",
        help="Run the tests without torchext and then in each of these modes, separated by commas, and report tests "
        "that pass in the first run only. " + "; ".join(f"{name}: {mode.text}" for name, mode in MODES.items()),
    )
    group.addoption("--torchext-report", metavar="FILE", help="Write all results to FILE, as JSON.")
    group.addoption(
        "--torchext-timeout",
        metavar="SECONDS",
        type=float,
        default=0,
        help="End the process of a test that takes longer, count the test as timed out, and continue.",
    )
    group.addoption(
        "--torchext-reruns",
        metavar="N",
        type=int,
        default=1,
        help="How often to run differing tests again without torchext, to detect unstable tests (default: 1).",
    )


def main(arguments: list[str]) -> int:
    """Run pytest with `arguments`, and return its exit code."""
    job = Job.from_environment()
    if job.cwd_on_path:
        sys.path.insert(0, str(Path.cwd()))
    return int(pytest.main(arguments, plugins=[_Plugin(job)]))


def pytest_configure(config: pytest.Config) -> None:
    """Register this module as a plugin in a worker of xdist."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Runner(Job.from_environment()))


class _Plugin:
    # Pytest recognizes the requested plugin by this name, and does not import the real one.
    __name__ = _PLUGIN

    def __init__(self, job: Job) -> None:
        self.job = job

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        pytest_addoption(parser)

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        _report_by_records_only(config)
        if self.job.only is not None:
            _choose_by_node_id_only(config)
        config.pluginmanager.register(_Recorder(self.job, config))
        if _has_workers(config):
            _hand_on_to_workers(config)
        else:
            config.pluginmanager.register(_Runner(self.job))


def _report_by_records_only(config: pytest.Config) -> None:
    """Let the terminal show progress, and let all tests run."""
    option = config.option
    option.no_header = option.no_summary = True
    option.continue_on_collection_errors = True
    option.maxfail = 0  # see `Job.stop_after`


def _hand_on_to_workers(config: pytest.Config) -> None:
    """Let workers of xdist, which get the command line, import this module instead of torchext, and run all tests."""
    asked = config.invocation_params
    arguments = [__name__ if argument == _PLUGIN else argument for argument in map(str, asked.args)]
    arguments += ["-p", f"no:{_PLUGIN}", "-p", __name__, "--continue-on-collection-errors", "--maxfail=0"]
    config.invocation_params = type(asked)(args=arguments, plugins=asked.plugins, dir=asked.dir)


def _choose_by_node_id_only(config: pytest.Config) -> None:
    """Ignore results of earlier runs in the selection: the last run was the baseline or another mode."""
    config.option.lf = config.option.failedfirst = config.option.newfirst = config.option.stepwise = False


def _has_workers(config: pytest.Config) -> bool:
    return getattr(config.option, "dist", "no") != "no" and bool(config.option.tx)


class _Runner:
    """Runs the requested tests in the mode, with a time limit."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.clock: TextIO | None = None
        self.deadline: float | None = None
        if job.timeout:
            self.clock = Path(job.folder, f"clock.{os.getpid()}").open("w+")  # noqa: SIM115 - open as long as the process is
        if job.mode is not None:
            _enter_mode(job.mode, job.is_control)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.job.only is None:
            return
        order = {nodeid: position for position, nodeid in enumerate(self.job.only)}
        deselected = [item for item in items if item.nodeid not in order]
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
        if deselected:
            config.hook.pytest_deselected(items=deselected)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if self.clock is None:
            return (yield)
        self.clock.seek(0)
        self.clock.truncate()
        self.clock.write(item.nodeid + "\n")
        self.clock.flush()
        self.deadline = time.monotonic() + self.job.timeout
        self._watch()
        try:
            return (yield)
        finally:
            self.deadline = None
            faulthandler.cancel_dump_traceback_later()

    def pytest_runtest_logstart(self) -> None:
        # faulthandler has only one timer. With `faulthandler_timeout`, pytest has just used it for a timeout that ends
        # nothing.
        self._watch()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        # pytest cancels the timer here, but the teardown of the failed test may hang.
        self._watch()

    def _watch(self) -> None:
        if self.deadline is None:
            return
        left = max(self.deadline - time.monotonic(), 0.001)
        # Implemented in C on its own thread, so it also ends a test that holds the interpreter's lock.
        faulthandler.dump_traceback_later(left, exit=True, file=self.clock)  # type: ignore[arg-type]


def _enter_mode(mode: str, is_control: bool) -> None:
    torchext_is_in = str(Path(__file__).resolve().parents[3])
    if torchext_is_in not in sys.path:
        sys.path.append(torchext_is_in)
    from torchext.testing.modes import enter_mode

    enter_mode(mode, is_control)


class _Recorder:
    """Records the outcomes of tests, one record per line."""

    def __init__(self, job: Job, config: pytest.Config) -> None:
        self.job = job
        self.config = config
        self.pid = os.getpid()
        self.file = Path(job.folder, "records.jsonl").open("a")  # noqa: SIM115 - open as long as the process is
        self.failed: set[str] = set()

    def write(self, kind: str, **content: object) -> None:
        if os.getpid() == self.pid:  # not in a process that a test has forked
            self.file.write(json.dumps({"kind": kind, **content}) + "\n")
            self.file.flush()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("collection", id=report.nodeid, **_error_of(report))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self.write("collected", ids=[item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Iterable[str]) -> None:
        self.write("collected", ids=list(ids))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write("start", id=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = _outcome_of(report)
        if outcome is not None:
            self.write("report", id=report.nodeid, outcome=outcome, **(_error_of(report) if report.failed else {}))
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write("finish", id=nodeid)
        if 0 < self.job.stop_after <= len(self.failed):
            self.write("stopped")
            self._stop(f"stopping after {len(self.failed)} failures")

    def _stop(self, why: str) -> None:
        workers = self.config.pluginmanager.get_plugin("dsession")
        (workers or self.session).shouldstop = why

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.session: Any = session

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write("end", status=int(exitstatus))


def _outcome_of(report: pytest.TestReport) -> str | None:
    """Return the outcome in a report, or None for a part of a test that succeeded."""
    if report.outcome == "failed":
        # The report of xdist for a lost worker belongs to no part of the test.
        return {"call": "failed", "???": "crashed"}.get(str(report.when), "error")
    if report.outcome == "skipped":
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if report.outcome == "passed" and report.when == "call":
        return "xpassed" if hasattr(report, "wasxfail") else "passed"
    return None


def _error_of(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    text = report.longreprtext
    crash = getattr(report.longrepr, "reprcrash", None)
    # A collection error has only a text, whose last line begins with pytest's mark.
    message = crash.message if crash is not None else text.rstrip().rpartition("\n")[2].removeprefix("E").strip()
    return {"error": next(filter(str.strip, message.splitlines()), ""), "text": text[-_LONGEST_TEXT:]}


def _move_own_folder_to_the_end_of_path() -> None:
    own = Path(__file__).resolve().parent
    # Python puts the script's folder first, but not with -P or PYTHONSAFEPATH.
    if sys.path and Path(sys.path[0]).resolve() == own:
        del sys.path[0]
    sys.path.append(str(own))


if __name__ == "__main__":
    # Run as the module that xdist's workers import by name, not as the script.
    _move_own_folder_to_the_end_of_path()
    sys.exit(import_module("torchext_recorder").main(sys.argv[1:]))
