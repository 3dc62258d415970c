"""A pytest plugin that reports which tests of a suite torchext breaks.

`pytest -p torchext.testing.plugin --torchext=installed TESTS`; see docs/how_to/foreign_suites.md.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..descriptions import DEFAULT_VALUES
from ..fake import FakeGPU
from ..fake.values import ValuePolicy
from ..internals.document import Table, Title, as_text
from ..internals.text import bytes_of, in_units
from ..memory import Fit
from ..memory.fitting import check_types, measure, one_gpu
from .child import torchext_recorder
from .child.torchext_recorder import MODES, Job, pytest_addoption

__all__ = ["assert_fits", "pytest_addoption", "pytest_cmdline_main"]


# ---- Run a suite in separate processes until each test has run or has ended its process, and compare two such runs


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


# ---- A mode compared with the run without torchext


@dataclass
class Comparison:
    """The results of a suite in a mode."""

    mode: str
    baseline: SuiteRun
    """Without torchext."""
    run: SuiteRun
    """In the mode."""
    differences: dict[str, Outcome] = field(default_factory=dict)
    """Results in the mode of tests that pass without torchext but not in the mode."""
    unstable: dict[str, Outcome] = field(default_factory=dict)
    """Tests among the differing ones that also failed without torchext when they were run again, with their errors."""
    by_replacing: dict[str, Outcome] = field(default_factory=dict)
    """Tests among the differing ones that failed in the control run with pass-through wrappers."""

    @property
    def skipped(self) -> list[str]:
        """Tests that were skipped in the mode only."""
        return [nodeid for nodeid, outcome in self.run.outcomes.items() if outcome.outcome == "skipped"]

    @property
    def compared(self) -> list[str]:
        """Tests that pass without torchext and have a result in the mode."""
        left_out = {*self.unstable, *self.by_replacing, *self.skipped}
        return [nodeid for nodeid in {**self.run.outcomes, **self.differences} if nodeid not in left_out]

    @property
    def is_different(self) -> bool:
        """Whether torchext breaks a test of the suite."""
        return bool(self.differences or (self.run.trouble and not self.baseline.trouble))


def compare(
    suite: Suite, baseline: SuiteRun, mode: str, *, reruns: int, stop_after: int, report: Callable[[str], None]
) -> Comparison:
    """Run in `mode` the tests that pass in `baseline`.

    Args:
        suite: The suite.
        baseline: Its results without torchext.
        mode: One of MODES.
        reruns: How often to run differing tests again without torchext.
        stop_after: Number of failures after which to stop; 0 for no limit.
        report: Called with a description of each step.
    """
    good = [nodeid for nodeid, outcome in baseline.outcomes.items() if outcome.is_good]
    report(f"{len(good)} tests in mode {mode}")
    comparison = Comparison(mode, baseline, suite.run(mode, good, stop_after=stop_after))
    comparison.differences = {nodeid: outcome for nodeid in good if (outcome := _difference(comparison, nodeid))}
    if comparison.differences and reruns:
        _take_unstable(suite, comparison, good, reruns, report)
    if comparison.differences and MODES[mode].has_control:
        report(f"{len(comparison.differences)} tests that differ, with pass-through wrappers of PyTorch functions")
        control = suite.run(mode, list(comparison.differences), is_control=True)
        comparison.by_replacing = _take_failing(comparison.differences, control)
    return comparison


def _take_unstable(
    suite: Suite, comparison: Comparison, good: list[str], reruns: int, report: Callable[[str], None]
) -> None:
    """Remove from the differences the tests whose failure may not be due to torchext."""
    differences = comparison.differences
    for _ in range(reruns):
        report(f"{len(differences)} tests that differ, again without torchext")
        comparison.unstable |= _take_failing(differences, suite.run(None, list(differences)))
        if not differences:
            return
    report(f"{len(differences)} tests that differ, again in mode {comparison.mode}, without the other tests")
    alone = suite.run(comparison.mode, list(differences))
    after_others = [nodeid for nodeid in differences if (known := alone.outcomes.get(nodeid)) and known.is_good]
    if after_others:
        # The baseline may have run tests in several processes, or other tests in between.
        report(f"{len(after_others)} tests fail only after others: all {len(good)} again without torchext")
        comparison.unstable |= _take_failing(differences, suite.run(None, good), after_others)


def _difference(comparison: Comparison, nodeid: str) -> Outcome | None:
    run = comparison.run
    outcome = run.outcomes.get(nodeid)
    if outcome is not None:
        return None if outcome.is_good or outcome.outcome == "skipped" else outcome
    if run.was_stopped:
        return None
    return next(
        (error for part, error in run.collection_errors.items() if f"{nodeid}::".startswith((f"{part}::", f"{part}/"))),
        Outcome("error", run.trouble or "the test was not collected"),
    )


def _take_failing(
    differences: dict[str, Outcome], again: SuiteRun, among: Collection[str] | None = None
) -> dict[str, Outcome]:
    """Remove the tests from `differences` that failed again."""
    gone = Outcome("error", "the test was not collected")
    outcomes = {nodeid: again.outcomes.get(nodeid, gone) for nodeid in (differences if among is None else among)}
    failing = {nodeid: outcome for nodeid, outcome in outcomes.items() if not outcome.is_good}
    for nodeid in failing:
        del differences[nodeid]
    return failing


# ---- Reports of comparisons: a table for readers, JSON for programs


def text_of(comparison: Comparison) -> str:
    """Return the table, and the differing tests."""
    tests = {
        "unstable: they also failed without torchext when they were run again": comparison.unstable,
        "fails in control run: they fail with pass-through wrappers of PyTorch functions": comparison.by_replacing,
        f"different: they pass without torchext, but not in mode {comparison.mode}": comparison.differences,
    }
    parts = [Title(f"{title}:", list(starmap(_line_of, found.items()))) for title, found in tests.items() if found]
    return as_text([_table(comparison), *parts, comparison.run.trouble])


def _line_of(nodeid: str, outcome: Outcome) -> str:
    return f"  {nodeid}: {outcome.outcome}{': ' if outcome.error else ''}{outcome.error}"


def _table(comparison: Comparison) -> Table:
    baseline, compared, differing = comparison.baseline.outcomes, comparison.compared, comparison.differences
    counts = {
        "tests": _by_file(baseline),
        "pass without": _by_file(nodeid for nodeid, outcome in baseline.items() if outcome.is_good),
        "compared": _by_file(compared),
        "pass": _by_file(nodeid for nodeid in compared if nodeid not in differing),
        "differ": _by_file(differing),
        "unstable": _by_file(comparison.unstable),
        "fails in control run": _by_file(comparison.by_replacing),
        "skipped": _by_file(comparison.skipped),
    }
    rows = [(file, *(count[file] for count in counts.values())) for file in counts["tests"]]
    if len(rows) > 1:
        rows.append(("all", *(count.total() for count in counts.values())))
    return Table(("file", *counts), rows)


def _by_file(nodeids: Iterable[str]) -> Counter[str]:
    return Counter(nodeid.partition("::")[0] for nodeid in nodeids)


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


# ---- A pytest plugin that reports which tests of a suite torchext breaks


# With these options pytest does not run tests.
_NO_RUN = (
    *("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow", "collectonly", "setupplan"),
)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run the suite without and with torchext, in separate processes, if `--torchext` is given."""
    modes = config.getoption("--torchext")
    is_worker = hasattr(config, "workerinput")  # of xdist, in another plugin's run
    if modes is None or is_worker or any(getattr(config.option, name, None) for name in _NO_RUN):
        return None
    try:
        return _run(config, _checked(modes))
    except KeyboardInterrupt:
        _report_step("interrupted")
        return pytest.ExitCode.INTERRUPTED


def _checked(modes: str) -> list[str]:
    names = modes.split(",")
    for name in names:
        if name not in MODES:
            raise pytest.UsageError(f"--torchext: unknown mode {name!r}, expected one of {', '.join(MODES)}.")
    return names


def _run(config: pytest.Config, modes: list[str]) -> int:
    arguments = [*map(str, config.invocation_params.args)]
    suite = Suite(
        arguments,
        str(config.invocation_params.dir),
        is_module_call=Path(sys.argv[0]).name == "__main__.py" and not getattr(sys.flags, "safe_path", False),
        timeout=config.getoption("--torchext-timeout"),
    )
    report = config.getoption("--torchext-report")
    _report_step("the suite without torchext")
    baseline = suite.run()
    _report_baseline(baseline)
    if baseline.exit_code:
        return baseline.exit_code
    comparisons: list[Comparison] = []
    if not any(outcome.is_good for outcome in baseline.outcomes.values()):
        if report:
            write_json(Path(report), arguments, baseline, comparisons)
        return _code_without_comparison(baseline)
    for mode in modes:
        comparison = compare(
            suite,
            baseline,
            mode,
            reruns=config.getoption("--torchext-reruns"),
            stop_after=config.getoption("maxfail") or 0,
            report=_report_step,
        )
        comparisons.append(comparison)
        if report:
            write_json(Path(report), arguments, baseline, comparisons)
    for comparison in comparisons:
        _report_step(f"mode {comparison.mode}")
        print(text_of(comparison))
    sys.stdout.flush()
    return int(any(comparison.is_different for comparison in comparisons))


def _report_baseline(baseline: SuiteRun) -> None:
    for nodeid, outcome in baseline.collection_errors.items():
        print(f"  not collected: {nodeid}: {outcome.error}")
    if baseline.trouble:
        print(baseline.trouble)


def _code_without_comparison(baseline: SuiteRun) -> int:
    if not baseline.outcomes:
        _report_step("no test was collected, so nothing was compared")
        return pytest.ExitCode.NO_TESTS_COLLECTED
    _report_step("no test passed without torchext, so nothing was compared")
    return pytest.ExitCode.TESTS_FAILED


def _report_step(what: str) -> None:
    print(f"== torchext: {what} ==", flush=True)


# ---- The assertion that a program fits on a GPU


def assert_fits(
    program: Callable[[], Any],
    gpu: str | int | FakeGPU = "H100-80GB",
    *,
    headroom: int | str = 0,
    values: str | ValuePolicy = DEFAULT_VALUES,
) -> Fit:
    """Raise AssertionError unless `program` fits on a fake GPU with the headroom. See the fixture `assert_fits`."""
    __tracebackhide__ = True  # pytest shows the line of the test
    check_types("assert_fits", "a function that runs the program", program, values)
    spare = bytes_of(headroom, "headroom") if headroom else 0
    fit = measure(program, one_gpu(gpu, must_have_limit=True), values=values)
    if not fit.fits:
        raise AssertionError(f"{fit!r}\n{fit.error}\n\n{fit.memory}")
    if not fit.peak_reserved:
        raise AssertionError(f'The program has allocated no memory on {fit.gpu}. Construct the model on "cuda" in it.')
    if fit.headroom < spare:
        raise AssertionError(
            f"{fit!r}\nA headroom of {in_units(spare)} was expected, got {in_units(int(fit.headroom))}.\n\n{fit.memory}"
        )
    return fit
