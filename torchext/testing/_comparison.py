"""Comparing what becomes of a suite in a mode with what becomes of it without torchext."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from ._suite import Outcome, Suite, SuiteRun
from .child.torchext_recorder import MODES

__all__ = ["Comparison", "compare"]


@dataclass
class Comparison:
    """A suite in a mode."""

    mode: str
    baseline: SuiteRun
    """Without torchext."""
    run: SuiteRun
    """In the mode."""
    differences: dict[str, Outcome] = field(default_factory=dict)
    """What became in the mode of tests that pass without torchext."""
    unstable: dict[str, Outcome] = field(default_factory=dict)
    """Of those that differ, which failed without torchext, too, when they were run again: with these errors."""
    by_replacing: dict[str, Outcome] = field(default_factory=dict)
    """Of those that differ, which failed when what the mode replaces was replaced by what only hands on."""

    @property
    def skipped(self) -> list[str]:
        """Tests that were skipped in the mode only."""
        return [nodeid for nodeid, outcome in self.run.outcomes.items() if outcome.outcome == "skipped"]

    @property
    def compared(self) -> list[str]:
        """Tests that pass without torchext, and of which it is known what becomes of them in the mode."""
        left_out = {*self.unstable, *self.by_replacing, *self.skipped}
        return [nodeid for nodeid in {**self.run.outcomes, **self.differences} if nodeid not in left_out]

    @property
    def is_different(self) -> bool:
        """Whether torchext breaks something of the suite."""
        return bool(self.differences or (self.run.trouble and not self.baseline.trouble))


def compare(
    suite: Suite, baseline: SuiteRun, mode: str, *, reruns: int, stop_after: int, tell: Callable[[str], None]
) -> Comparison:
    """Runs what passes in `baseline` in `mode`.

    Args:
        suite: The suite.
        baseline: What became of it without torchext.
        mode: One of MODES.
        reruns: How often to run what differs again without torchext.
        stop_after: With how many failures to stop; 0 for any number.
        tell: Is told what is done next.
    """
    good = [nodeid for nodeid, outcome in baseline.outcomes.items() if outcome.is_good]
    tell(f"{len(good)} tests in mode {mode}")
    comparison = Comparison(mode, baseline, suite.run(mode, good, stop_after=stop_after))
    comparison.differences = {nodeid: outcome for nodeid in good if (outcome := _difference(comparison, nodeid))}
    if comparison.differences and reruns:
        _take_unstable(suite, comparison, good, reruns, tell)
    if comparison.differences and MODES[mode].has_control:
        tell(f"{len(comparison.differences)} tests that differ, with functions in PyTorch's places that only hand on")
        control = suite.run(mode, list(comparison.differences), is_control=True)
        comparison.by_replacing = _take_failing(comparison.differences, control)
    return comparison


def _take_unstable(
    suite: Suite, comparison: Comparison, good: list[str], reruns: int, tell: Callable[[str], None]
) -> None:
    """Removes from the differences the tests whose failure may have other reasons than torchext."""
    differences = comparison.differences
    for _ in range(reruns):
        tell(f"{len(differences)} tests that differ, again without torchext")
        comparison.unstable |= _take_failing(differences, suite.run(None, list(differences)))
        if not differences:
            return
    tell(f"{len(differences)} tests that differ, again in mode {comparison.mode}, without the others")
    alone = suite.run(comparison.mode, list(differences))
    after_others = [nodeid for nodeid in differences if (known := alone.outcomes.get(nodeid)) and known.is_good]
    if after_others:
        # In the baseline tests may have been run in several processes, or there were others between them.
        tell(f"{len(after_others)} tests fail after others only: all {len(good)} again without torchext")
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
    """Removes from `differences` those that were not good when they were run again."""
    gone = Outcome("error", "the test was not collected")
    outcomes = {nodeid: again.outcomes.get(nodeid, gone) for nodeid in (differences if among is None else among)}
    failing = {nodeid: outcome for nodeid, outcome in outcomes.items() if not outcome.is_good}
    for nodeid in failing:
        del differences[nodeid]
    return failing
