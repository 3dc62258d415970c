"""Runs pytest once, as `plugin` asks by a file, and writes down what becomes of each test as soon as it is known.

`plugin` starts this file as a script, in a process of its own, which a test may end in any way. Workers of xdist import
it. It needs pytest only: the processes of the baseline must not import torchext, which is what they are there to be
compared with.
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
    """A way to run a suite with torchext. What it does is in `torchext/testing/modes`, in the file of its name."""

    text: str
    """What it is, for those who ask for help."""
    has_control: bool = False
    """Whether it replaces functions, which can also be replaced by ones that only call them, in a control run."""


MODES = {
    "installed": Mode("every feature of torchext has been used once, nothing of PyTorch's is replaced"),
    "deferred": Mode("modules that tests construct are deferred, and materialized at once", has_control=True),
    "deferred-factories": Mode("so are tensors that tests make by torch.ones() and the like", has_control=True),
    "inference": Mode("torch.inference_mode is torchext's"),
    "autocast": Mode("torch.autocast enters and leaves torchext's regions"),
    "fake": Mode("FakeTensorMode, where tests use it, is torchext's fake_mode"),
}

_JOB = "TORCHEXT_SUITE_JOB"  # the environment variable that names the file
_PLUGIN = "torchext.testing.plugin"
_LONGEST_TEXT = 20_000


class Job(NamedTuple):
    """What a process is to do. It is handed over as JSON."""

    folder: str
    """Where to write: `records.jsonl`, and a file about timeouts for each process that runs tests."""
    mode: str | None = None
    """One of MODES; in the baseline, None."""
    is_control: bool = False
    """Replace what the mode replaces by what only hands on."""
    only: list[str] | None = None
    """The node ids of the tests to run, in their order; None for all that pytest collects."""
    timeout: float = 0
    """How many seconds a test may take; 0 for any."""
    stop_after: int = 0
    """How many failures end the run; 0 for any number."""
    cwd_on_path: bool = False
    """Put the working directory on `sys.path`, as `python -m pytest` does."""

    @classmethod
    def from_environment(cls) -> Job:
        """Reads the job of this process."""
        return cls(**json.loads(Path(os.environ[_JOB]).read_text()))

    def environment(self) -> dict[str, str]:
        """Writes the job down. Returns what the environment of the process has to have beside this one's."""
        path = Path(self.folder, "job.json")
        path.write_text(json.dumps(self._asdict()))
        return {_JOB: str(path)}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the plugin."""
    group = parser.getgroup("torchext", "torchext: does it break this suite?")
    group.addoption(
        "--torchext",
        metavar="MODES",
        help="Run the tests without torchext and then in each of these modes, separated by commas, and report which of "
        "them pass in the first run only. " + "; ".join(f"{name}: {mode.text}" for name, mode in MODES.items()),
    )
    group.addoption("--torchext-report", metavar="FILE", help="Write all results to FILE, as JSON.")
    group.addoption(
        "--torchext-timeout",
        metavar="SECONDS",
        type=float,
        default=0,
        help="End the process of a test that takes longer, count the test as timed out, and go on with the next.",
    )
    group.addoption(
        "--torchext-reruns",
        metavar="N",
        type=int,
        default=1,
        help="How often to run tests that differ again without torchext, to tell those that are unstable (default: 1).",
    )


def main(arguments: list[str]) -> int:
    """Runs pytest with `arguments`, and returns its exit code."""
    job = Job.from_environment()
    if job.cwd_on_path:
        sys.path.insert(0, str(Path.cwd()))
    return int(pytest.main(arguments, plugins=[_Plugin(job)]))


def pytest_configure(config: pytest.Config) -> None:
    """Makes a plugin of this module in a worker of xdist."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(_Runner(Job.from_environment()))


class _Plugin:
    # Under this name pytest takes it for the plugin that has been asked for, and imports no other.
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
    """Lets the terminal show progress, and all tests run that can be."""
    option = config.option
    option.no_header = option.no_summary = True
    option.continue_on_collection_errors = True
    option.maxfail = 0  # see `Job.stop_after`


def _hand_on_to_workers(config: pytest.Config) -> None:
    """Lets workers of xdist, which are given the command line, import this and not torchext, and run all tests."""
    asked = config.invocation_params
    arguments = [__name__ if argument == _PLUGIN else argument for argument in map(str, asked.args)]
    arguments += ["--continue-on-collection-errors", "--maxfail=0"]
    config.invocation_params = type(asked)(args=arguments, plugins=asked.plugins, dir=asked.dir)


def _choose_by_node_id_only(config: pytest.Config) -> None:
    """Not by what became of the tests in the run before, which was one of ours."""
    config.option.lf = config.option.failedfirst = config.option.newfirst = config.option.stepwise = False


def _has_workers(config: pytest.Config) -> bool:
    return getattr(config.option, "dist", "no") != "no" and bool(config.option.tx)


class _Runner:
    """Runs the tests that were asked for, in the mode, and watches the clock."""

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
        # faulthandler has one timer. pytest, if `faulthandler_timeout` is set, has just used it for a timeout that ends
        # nothing.
        self._watch()

    @pytest.hookimpl(trylast=True)
    def pytest_exception_interact(self) -> None:
        # pytest cancels the timer here, and the teardown of the test that has failed may hang.
        self._watch()

    def _watch(self) -> None:
        if self.deadline is None:
            return
        left = max(self.deadline - time.monotonic(), 0.001)
        # In C, on a thread of its own: a test that holds the interpreter's lock is ended, too.
        faulthandler.dump_traceback_later(left, exit=True, file=self.clock)  # type: ignore[arg-type]


def _enter_mode(mode: str, is_control: bool) -> None:
    torchext_is_in = str(Path(__file__).resolve().parents[3])
    if torchext_is_in not in sys.path:
        sys.path.append(torchext_is_in)
    from torchext.testing.modes import enter_mode

    enter_mode(mode, is_control)


class _Recorder:
    """Writes down what becomes of the tests, one record a line."""

    def __init__(self, job: Job, config: pytest.Config) -> None:
        self.job = job
        self.config = config
        self.pid = os.getpid()
        self.file = Path(job.folder, "records.jsonl").open("a")  # noqa: SIM115 - open as long as the process is
        self.failed: set[str] = set()

    def write(self, kind: str, **content: object) -> None:
        if os.getpid() == self.pid:  # not what a test has forked
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
    """What a report says of its test; None for a part of it that went well."""
    if report.outcome == "failed":
        # What xdist says of a test whose worker is gone belongs to no part of it.
        return {"call": "failed", "???": "crashed"}.get(str(report.when), "error")
    if report.outcome == "skipped":
        return "xfailed" if hasattr(report, "wasxfail") else "skipped"
    if report.outcome == "passed" and report.when == "call":
        return "xpassed" if hasattr(report, "wasxfail") else "passed"
    return None


def _error_of(report: pytest.TestReport | pytest.CollectReport) -> dict[str, str]:
    text = report.longreprtext
    crash = getattr(report.longrepr, "reprcrash", None)
    # Of an error of collection there is the text only, whose last line begins with pytest's mark.
    message = crash.message if crash is not None else text.rstrip().rpartition("\n")[2].removeprefix("E").strip()
    return {"error": next(filter(str.strip, message.splitlines()), ""), "text": text[-_LONGEST_TEXT:]}


def _move_own_folder_to_the_end_of_path() -> None:
    own = Path(__file__).resolve().parent
    # Python puts it in front, but not with -P or PYTHONSAFEPATH.
    if sys.path and Path(sys.path[0]).resolve() == own:
        del sys.path[0]
    sys.path.append(str(own))


if __name__ == "__main__":
    # As the module that workers of xdist find by its name, not as the script.
    _move_own_folder_to_the_end_of_path()
    sys.exit(import_module("torchext_recorder").main(sys.argv[1:]))
