"""Advice: the search for combinations of remedies, by simulating them.

Operations of checkpointed blocks add up, but peaks do not: which blocks are recomputed decides when the peak is, and
fragmentation decides how much is reserved. So each combination is simulated. Blocks of one group (`Block.group`) are
interchangeable except for their position, so only the first and the last of a kind are tried at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from numbers import Real
from typing import Any

from ..descriptions import DEFAULT_VALUES, FakeGPU
from ..fake.values import ValuePolicy
from ..internals.arguments import check_is_int
from ..internals.text import bytes_of
from ..memory.fitting import check_types, measure, one_gpu
from ..memory.timeline import PINNED
from ..memory.tracking import counting_flops
from .advice import Advice, Outcome, outcome_on
from .applying import Application, applying
from .remedies import KINDS, Accumulate, Arguments, Block, Checkpoint, Findings, HalfPrecision, Remedy, remedies_for

__all__ = ["LimitReachedError", "Limits", "advise", "search"]

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


# ---- Advice about a training step


logger: logging.Logger = logging.getLogger(__name__)


def advise(
    make_step: Callable[..., Callable[[], Any]],
    gpu: str | int | FakeGPU = "H100-80GB",
    *,
    target: int | str | None = None,
    batch: int | None = None,
    steps: int = 2,
    remedies: Sequence[str] | None = None,
    allow_numerics: bool = False,
    seconds: float | None = 60.0,
    runs: int | None = None,
    values: str | ValuePolicy = DEFAULT_VALUES,
) -> Advice:
    """Find changes of a training step that lower its peak memory, by simulating the step with them.

    The step itself is not changed: each remedy is applied for the duration of a run on a fake GPU. Each result is that
    of a run, also those of combinations.

    `torch.compile()` in `make_step` is ignored, as in dry runs: the memory is that of the eager program.

    Args:
        make_step: Builds the model, the optimizer and the batch on "cuda", and returns a function that runs one step.
            Called for each run, with `batch` as its argument if that is given.
        gpu: As for `fits()`.
        target: The memory that the program may reserve, in bytes or as `"60GiB"`. Default: that of the GPU.
        batch: The size of the batch. The search then includes micro-batches with accumulated gradients.
        steps: The number of steps to run. One more is run to count its floating-point operations.
        remedies: The kinds of remedies to try: `checkpointing`, `allocator`, `optimizer`, `gradients`, `loss`,
            `resharding`, `offload`, `micro-batches`, `bfloat16`. Default: all that may help.
        allow_numerics: Whether to try remedies that change the computed values by more than rounding.
        seconds: The duration after which no further run starts; None for no limit.
        runs: The largest number of runs; None for no limit. Unlike `seconds`, it gives reproducible answers.
        values: As for `fits()`.

    Returns:
        The runs, the cheapest one that fits, and the front of peaks and operations.

    Raises:
        RuntimeError: As for `fits()`.
        TypeError: `make_step` or its result is not callable, or another argument has the wrong type.
        ValueError: The GPU, the policy for values or a kind of remedies is unknown, a number is out of range, or an
            argument is missing that a kind of `remedies` needs.
        Exception: Errors of the unchanged program, other than `torch.OutOfMemoryError`.

    Example:
        >>> def make_step():
        ...     layers = torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(1024, 16) for _ in range(6))).cuda()
        ...     optimizer = torch.optim.AdamW(layers.parameters())
        ...     x = torch.zeros(512, 32, 1024, device="cuda")
        ...     def step():
        ...         layers(x).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     return step
        >>> advice = advise(make_step, target="6GiB", remedies=["checkpointing"], seconds=None)
        >>> advice.solution.name
        'checkpoint 1 of 6 blocks'
    """
    check_types("advise", "a function that returns a step", make_step, values)
    device = one_gpu(gpu, must_have_limit=target is None)
    kinds = _checked_kinds(remedies)
    for kind, argument, is_given in (
        (HalfPrecision.kind, "allow_numerics=True", allow_numerics),
        (Accumulate.kind, "batch=", batch is not None),
    ):
        if remedies is not None and kind in kinds and not is_given:
            raise ValueError(f"`remedies`: {kind!r} needs the argument `{argument}`.")
    for name, number in (("steps", steps), ("batch", batch), ("runs", runs)):
        if number is not None:
            check_is_int(number, name)
            if number < 1:
                raise ValueError(f"`{name}`: expected at least 1, got {number}.")
    if seconds is not None and (not isinstance(seconds, Real) or isinstance(seconds, bool)):
        raise TypeError(f"`seconds`: expected a number or None, got {seconds!r}.")
    if seconds is not None and not seconds >= 0:  # NaN also
        raise ValueError(f"`seconds`: expected at least 0, got {seconds!r}.")
    limits_of_memory = [device.memory - device.context] if device.has_limit else []
    if target is not None:
        limits_of_memory.append(bytes_of(target, "target"))
    limit = min(limits_of_memory)
    limits = Limits(seconds, runs)
    simulation = _Simulation(make_step, device, batch, steps, values)
    baseline = simulation.run((), is_baseline=True)
    found = simulation.findings
    usable = [one for one in remedies_for(found, batch, allow_numerics=allow_numerics) if one.kind in kinds]
    blocks = found.blocks if Checkpoint.kind in kinds else ()
    return search(simulation.run, baseline, usable, blocks, gpu=device.name, limit=limit, limits=limits)


def _checked_kinds(remedies: Sequence[str] | None) -> set[str]:
    known = set(KINDS) - {Arguments.kind}
    kinds = known if remedies is None else set(remedies)
    if isinstance(remedies, str) or not kinds <= known:
        raise ValueError(f"`remedies`: expected kinds among {', '.join(sorted(known))}; got {remedies!r}.")
    return kinds


class _Simulation:
    """Runs the program with remedies.

    Attributes:
        findings: The properties of the unchanged program, after its run.
    """

    def __init__(
        self, make_step: Callable[..., Any], gpu: FakeGPU, batch: int | None, steps: int, values: str | ValuePolicy
    ) -> None:
        self._make_step = make_step
        self._gpu = gpu
        self._batch = batch
        self._steps = steps
        self._values = values
        self._flops: dict[tuple[Remedy, ...], int] = {}  # by the remedies that may change them
        self.findings = Findings()

    def run(self, remedies: tuple[Remedy, ...], *, is_baseline: bool = False) -> Outcome:
        """Run the program with `remedies`."""
        try:
            outcome = outcome_on(self._gpu, lambda gpu: self._measure(remedies, gpu))
        except Exception as error:
            if is_baseline:
                raise
            return Outcome(remedies, False, 0, 0, error=_first_line(error))
        logger.info("%r", outcome)
        return outcome

    def _measure(self, remedies: tuple[Remedy, ...], gpu: FakeGPU) -> Outcome:
        key = tuple(remedy for remedy in remedies if not remedy.keeps_operations)
        with applying(remedies) as application:

            def program() -> Callable[[], Any]:
                step = self._step(application)
                for _ in range(self._steps):
                    application.step(step)
                return step

            def count(step: Callable[[], Any]) -> None:
                if key in self._flops:
                    return
                with counting_flops() as mode:
                    application.step(step)
                    self._flops[key] = mode.get_total_flops()

            fit = measure(program, gpu, values=self._values, afterwards=count)
            if not remedies:
                self.findings = application.findings
        pinned = fit.memory.peak_allocated(PINNED).allocated if PINNED in fit.memory.places else 0
        return Outcome(remedies, fit.fits, fit.peak_reserved, fit.peak_allocated, self._flops.get(key), pinned)

    def _step(self, application: Application) -> Callable[[], Any]:
        size = next((one.batch for one in application.remedies if isinstance(one, Accumulate)), self._batch)
        step = self._make_step(*(() if size is None else (size,)))
        if not callable(step):
            expected = "`make_step` was expected to return a function that runs one step"
            raise TypeError(f"advise(): {expected}, got {type(step).__name__}.")
        found: Callable[[], Any] = step
        return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
