"""A pytest plugin that reports which tests of a suite torchext breaks.

`pytest -p torchext.testing.plugin --torchext=installed TESTS`; see docs/how_to/foreign_suites.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..descriptions import DEFAULT_VALUES
from ..fake import FakeGPU
from ..fake.values import ValuePolicy
from ..internals.text import bytes_of, in_units
from ..memory import Fit
from ..memory.fitting import check_types, measure, one_gpu
from . import _suite
from ._suite import Comparison, Suite, SuiteRun, compare
from .child.torchext_recorder import MODES, pytest_addoption

__all__ = ["assert_fits", "pytest_addoption", "pytest_cmdline_main"]

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
            _suite.write_json(Path(report), arguments, baseline, comparisons)
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
            _suite.write_json(Path(report), arguments, baseline, comparisons)
    for comparison in comparisons:
        _report_step(f"mode {comparison.mode}")
        print(_suite.text_of(comparison))
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
        raise AssertionError(f"{fit}\n{fit.error}\n\n{fit.memory}")
    if not fit.peak_reserved:
        raise AssertionError(f'The program has allocated no memory on {fit.gpu}. Construct the model on "cuda" in it.')
    if fit.headroom < spare:
        raise AssertionError(
            f"{fit}\nA headroom of {in_units(spare)} was expected, got {in_units(int(fit.headroom))}.\n\n{fit.memory}"
        )
    return fit
