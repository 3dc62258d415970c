"""Compares the results of a suite in a mode with those without torchext."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ._suite import Outcome, Suite, SuiteRun
from .child.torchext_recorder import MODES

__all__ = ["Comparison", "compare"]


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
