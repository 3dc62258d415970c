"""Advice about a training step: which changes lower its peak memory, and what they cost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from ..descriptions.gpus import FakeGPU
from ..internals.arguments import check_is_int
from ..internals.text import bytes_of
from ..memory.fitting import check_types, measure, one_gpu
from ..memory.flops import counting_flops
from ..memory.timeline import PINNED
from .advice import Advice, Outcome, outcome_on
from .applying import Application, applying
from .remedies import KINDS, Accumulate, Arguments, Checkpoint, Findings, HalfPrecision, Remedy, remedies_for
from .searching import Limits, search

__all__ = ["advise"]

logger = logging.getLogger(__name__)


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
    values: str = "raise",
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
    device = one_gpu(gpu)
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
    limit = device.memory - device.context
    limit = limit if target is None else min(bytes_of(target, "target"), limit)
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

    def __init__(self, make_step: Callable[..., Any], gpu: FakeGPU, batch: int | None, steps: int, values: str) -> None:
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
