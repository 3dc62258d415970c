"""Search for combinations of remedies by simulating them.

Operations of checkpointed blocks add up, but peaks do not: which blocks are recomputed decides when the peak is, and
fragmentation decides how much is reserved. So each combination is simulated. Blocks of one group (`Block.group`) are
interchangeable except for their position, so only the first and the last of a kind are tried at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from .advice import Advice, Outcome
from .blocks import Block
from .remedies import KINDS, Checkpoint, Remedy

__all__ = ["LimitReachedError", "Limits", "search"]

Simulate = Callable[[tuple[Remedy, ...]], Outcome]

ORDER = {kind: number for number, kind in enumerate(KINDS)}


class LimitReachedError(Exception):
    """Ends a search, with the runs so far."""


class Limits:
    """The limits of a search, which begins now.

    Args:
        seconds: The duration after which no further run is started; None for no limit.
        runs: The number of runs; None for no limit.
    """

    def __init__(self, seconds: float | None, runs: int | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._runs = runs

    def are_reached(self, runs: int) -> bool:
        """Return true if no run may follow the given number of them."""
        is_late = self._end is not None and time.monotonic() >= self._end
        return is_late or (self._runs is not None and runs >= self._runs)


def search(
    simulate: Simulate,
    baseline: Outcome,
    remedies: Sequence[Remedy],
    blocks: Sequence[Block],
    *,
    gpu: str,
    limit: int,
    limits: Limits,
) -> Advice:
    """Search for the cheapest combination of remedies that fits, and for the front of peaks and operations.

    Args:
        simulate: Runs the program with remedies.
        baseline: The run of the unchanged program.
        remedies: The remedies to try, besides checkpointing.
        blocks: The blocks that can be checkpointed, in order.
        gpu: The name of the GPU.
        limit: The bytes that the program may reserve.
        limits: The limits of time and of runs.
    """
    run = _Search(simulate, baseline, blocks, gpu, limit, limits)
    try:
        run.solve(remedies)
        run.explore()
    except LimitReachedError:
        return run.advice(is_complete=False)
    return run.advice(is_complete=True)


class _Search:
    def __init__(
        self, simulate: Simulate, baseline: Outcome, blocks: Sequence[Block], gpu: str, limit: int, limits: Limits
    ) -> None:
        self._simulate = simulate
        self._blocks = tuple(blocks)
        self._limits = limits
        self._gpu, self._limit = gpu, limit
        self._baseline = baseline
        self._runs: dict[tuple[Remedy, ...], Outcome] = {(): baseline}
        self._empty = Advice(gpu, limit, baseline, ())  # compares costs
        self._others: tuple[Remedy, ...] = ()  # combined with checkpointing

    def advice(self, *, is_complete: bool) -> Advice:
        """Return the runs so far."""
        runs = self._runs.values()
        usable, failed = (tuple(one for one in runs if bool(one.error) is fails) for fails in (False, True))
        return Advice(self._gpu, self._limit, self._baseline, usable, failed, is_complete)

    # ---- Combinations

    def solve(self, remedies: Sequence[Remedy]) -> None:
        """Try each remedy alone, and then combinations from the cheapest to the most expensive, until one fits."""
        singles = [self._run((remedy,)) for remedy in remedies]
        if self._blocks:
            self._run(self._with_blocks((), self._blocks))
        helpful = sorted(
            (one for one in singles if not one.error and one.peak_reserved < self._baseline.peak_reserved),
            key=lambda one: one.peak_reserved,
        )
        cheap = [one for one in helpful if one.remedies[0].is_cheap]
        self._others = self._combined((), cheap)
        if self._solve_with_blocks(self._others):
            return
        stronger = self._others
        for one in sorted((one for one in helpful if one not in cheap), key=self._empty.cost):
            for others in (self._replaced(self._others, one), self._replaced(stronger, one)):
                if self._solve_with_blocks(others):
                    return
            if self._peak(self._replaced(stronger, one)) < self._peak(stronger):
                stronger = self._replaced(stronger, one)

    def _combined(self, base: tuple[Remedy, ...], outcomes: Iterable[Outcome]) -> tuple[Remedy, ...]:
        """Add remedies one at a time, as long as each lowers the peak."""
        for one in outcomes:
            trial = self._replaced(base, one)
            if len(trial) > len(base) and self._peak(trial) < self._peak(base):
                base = trial
        return base

    def _replaced(self, base: tuple[Remedy, ...], one: Outcome) -> tuple[Remedy, ...]:
        """Return `base` with a remedy, in place of one of its kind."""
        (remedy,) = one.remedies
        kept = tuple(other for other in base if other.kind != remedy.kind)
        return _sorted((*kept, remedy))

    def _solve_with_blocks(self, others: tuple[Remedy, ...]) -> bool:
        """Find the fewest checkpointed blocks with which a combination fits. Return false if it never fits."""
        if self._meets(others):
            self._simplify(others)
            return True
        if not self._blocks or not self._meets(self._with_blocks(others, self._blocks)):
            return False
        self._others = others
        bad, good = 0, len(self._blocks)
        while good - bad > 1:
            middle = (good + bad) // 2
            fits = self._meets(self._with_blocks(others, self._blocks[:middle]))
            good, bad = (middle, bad) if fits else (good, middle)
        chosen = self._refined(others, self._blocks[:good])
        self._simplify(self._with_blocks(others, chosen))
        return True

    def _simplify(self, remedies: tuple[Remedy, ...]) -> None:
        """Leave out remedies that are not needed, the most expensive first."""
        for remedy in sorted(remedies, key=lambda one: -ORDER[one.kind]):
            rest = tuple(one for one in remedies if one is not remedy)
            if not isinstance(remedy, Checkpoint) and self._meets(rest):
                remedies = rest

    def _refined(self, others: tuple[Remedy, ...], chosen: Sequence[Block]) -> Sequence[Block]:
        """Improve the blocks that fit, by leaving out or exchanging one at a time."""
        while True:
            now = self._run(self._with_blocks(others, chosen))
            left_out = [self._without(chosen, block) for block in self._first_and_last(chosen)]
            unchosen = [block for block in self._blocks if block not in chosen]
            exchanged = [
                self._sorted_blocks((*self._without(chosen, block), other))
                for block in self._first_and_last(chosen)
                for other in self._first_and_last(unchosen)
                if other.group != block.group
            ]
            runs = ((self._run(self._with_blocks(others, trial)), trial) for trial in (*left_out, *exchanged))
            better = [(self._empty.cost(one), trial) for one, trial in runs if self._fits(one)]
            cost, trial = min(better, default=((), ()), key=lambda pair: pair[0])
            if not cost or cost >= self._empty.cost(now):
                return chosen
            chosen = trial

    # ---- The front

    def explore(self) -> None:
        """Checkpoint the first blocks; of several kinds, also one more at a time, and one fewer at a time.

        The other remedies are those that lower the peak cheaply, or those with which fewer blocks made the program
        fit. The first blocks of one kind are the best ones: the others are
        freed before the first ones are recomputed.
        """
        others = self._others
        if not self._blocks:
            return
        for count in _coarse_to_fine(len(self._blocks)):
            self._run(self._with_blocks(others, self._blocks[:count]))
        for is_growing in (True, False) if len({block.group for block in self._blocks}) > 1 else ():
            chosen: Sequence[Block] = () if is_growing else self._blocks
            for _ in self._blocks:
                chosen = self._next(others, chosen, is_growing)

    def _next(self, others: tuple[Remedy, ...], chosen: Sequence[Block], is_growing: bool) -> Sequence[Block]:
        now = self._run(self._with_blocks(others, chosen))
        if is_growing:
            rest = [block for block in self._blocks if block not in chosen]
            trials = [self._sorted_blocks((*chosen, block)) for block in self._first_and_last(rest)]
        else:
            trials = [self._without(chosen, block) for block in self._first_and_last(chosen)]

        def gain(trial: Sequence[Block]) -> tuple[float, float]:
            """Return the change of the peaks for each operation; of those that do not change the peak, the cheapest."""
            one = self._run(self._with_blocks(others, trial))
            operations = max(abs((one.flops or 0) - (now.flops or 0)), 1)
            return (
                (now.peak_reserved - one.peak_reserved) / operations,
                (now.peak_allocated - one.peak_allocated) / operations,
            )

        return max(trials, key=gain)

    # ---- Runs

    def _run(self, remedies: tuple[Remedy, ...]) -> Outcome:
        found = self._runs.get(remedies)
        if found is None:
            if self._limits.are_reached(len(self._runs)):
                raise LimitReachedError
            found = self._runs[remedies] = self._simulate(remedies)
        return found

    def _fits(self, one: Outcome) -> bool:
        return not one.error and self._empty.meets(one)

    def _meets(self, remedies: tuple[Remedy, ...]) -> bool:
        return self._fits(self._run(remedies))

    def _peak(self, remedies: tuple[Remedy, ...]) -> float:
        one = self._run(remedies)
        return float("inf") if one.error else one.peak_reserved

    def _with_blocks(self, others: tuple[Remedy, ...], blocks: Sequence[Block]) -> tuple[Remedy, ...]:
        return _sorted((*others, Checkpoint(tuple(blocks), len(self._blocks)))) if blocks else others

    def _sorted_blocks(self, blocks: Iterable[Block]) -> tuple[Block, ...]:
        chosen = set(blocks)
        return tuple(block for block in self._blocks if block in chosen)

    @staticmethod
    def _without(blocks: Sequence[Block], left_out: Block) -> tuple[Block, ...]:
        return tuple(block for block in blocks if block != left_out)

    @staticmethod
    def _first_and_last(blocks: Sequence[Block]) -> list[Block]:
        """Return the first and the last block of each kind."""
        ordered = sorted(blocks, key=lambda block: block.group)
        groups = (list(group) for _, group in groupby(ordered, key=lambda block: block.group))
        return [block for group in groups for block in dict.fromkeys((group[0], group[-1]))]


def _sorted(remedies: Iterable[Remedy]) -> tuple[Remedy, ...]:
    return tuple(sorted(remedies, key=lambda one: ORDER[one.kind]))


def _coarse_to_fine(count: int) -> Iterator[int]:
    """Return the numbers from 0 to `count`, so that each beginning of them is spread over the range."""
    yield from (0, count)
    step = 1 << (count - 1).bit_length()
    while step > 1:
        step //= 2
        yield from range(step, count, 2 * step)
