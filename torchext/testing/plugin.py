"""A plugin of pytest that tells which tests of a suite torchext breaks.

`pytest -p torchext.testing.plugin --torchext=installed TESTS`; docs/how_to/foreign_suites.md is about its use.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from . import _report
from ._comparison import Comparison, compare
from ._suite import Suite, SuiteRun
from .child.torchext_recorder import MODES, pytest_addoption

__all__ = ["pytest_addoption", "pytest_cmdline_main"]


# What is asked for with these is not a run of the tests.
_NO_RUN = (
    *("help", "version", "markers", "showfixtures", "show_fixtures_per_test", "cacheshow", "collectonly", "setupplan"),
)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Runs the suite without torchext and with it, if that is asked for, in processes of their own."""
    modes = config.getoption("--torchext")
    is_worker = hasattr(config, "workerinput")  # of xdist, in a run of somebody else's
    if modes is None or is_worker or any(getattr(config.option, name, None) for name in _NO_RUN):
        return None
    try:
        return _run(config, _checked(modes))
    except KeyboardInterrupt:
        _tell("interrupted")
        return pytest.ExitCode.INTERRUPTED


def _checked(modes: str) -> list[str]:
    names = modes.split(",")
    for name in names:
        if name not in MODES:
            raise pytest.UsageError(f"--torchext: there is no mode {name!r}; the modes are {', '.join(MODES)}.")
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
    _tell("the suite without torchext")
    baseline = suite.run()
    _tell_of_baseline(baseline)
    if baseline.exit_code:
        return baseline.exit_code
    comparisons: list[Comparison] = []
    if not any(outcome.is_good for outcome in baseline.outcomes.values()):
        if report:
            _report.write_json(Path(report), arguments, baseline, comparisons)
        return _code_without_comparison(baseline)
    for mode in modes:
        comparison = compare(
            suite,
            baseline,
            mode,
            reruns=config.getoption("--torchext-reruns"),
            stop_after=config.getoption("maxfail") or 0,
            tell=_tell,
        )
        comparisons.append(comparison)
        if report:
            _report.write_json(Path(report), arguments, baseline, comparisons)
    for comparison in comparisons:
        _tell(f"mode {comparison.mode}")
        for line in _report.lines_of(comparison):
            print(line)
    sys.stdout.flush()
    return int(any(comparison.is_different for comparison in comparisons))


def _tell_of_baseline(baseline: SuiteRun) -> None:
    for nodeid, outcome in baseline.collection_errors.items():
        print(f"  not collected: {nodeid}: {outcome.error}")
    if baseline.trouble:
        print(baseline.trouble)


def _code_without_comparison(baseline: SuiteRun) -> int:
    if not baseline.outcomes:
        _tell("no test was collected, so nothing was compared")
        return pytest.ExitCode.NO_TESTS_COLLECTED
    _tell("no test passed without torchext, so nothing was compared")
    return pytest.ExitCode.TESTS_FAILED


def _tell(what: str) -> None:
    print(f"== torchext: {what} ==", flush=True)
