"""Whether a program fits on a device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from typing_extensions import Self

from ..fake import FakeGPU, carry_blocks_to_threads, fake_mode
from ..fake.assumed_values import AssumedValue, assuming_values
from .tracking import TrackedMemory, track_memory

__all__ = ["Fit", "MaxBatch", "fits", "max_batch"]


@dataclass(frozen=True)
class Fit:
    """Whether a program fits, and what it needs. True in conditions if it does.

    Attributes:
        fits: Whether it ran to its end.
        peak: The most bytes that were reserved on the device: if it did not fit, until then.
        capacity: The bytes that a program can allocate there.
        memory: What was tracked.
        error: The error of the device, if it did not fit.
        assumed: Where values were read that do not exist, and what the program found instead.
    """

    fits: bool
    peak: int
    capacity: int
    memory: TrackedMemory
    error: torch.OutOfMemoryError | None = None
    assumed: list[AssumedValue] = field(default_factory=list)

    @property
    def headroom(self) -> int:
        """The bytes that are left; negative or small if it did not fit."""
        return self.capacity - self.peak

    def __bool__(self) -> bool:
        return self.fits


class MaxBatch(int):
    """The size of the largest batch that fits.

    Attributes:
        assumed: Where the run with this size, or for 0 with the smallest, has read values that do not exist, and what
            the program found instead.
    """

    assumed: list[AssumedValue]

    def __new__(cls, size: int, assumed: list[AssumedValue]) -> Self:
        """Returns the number `size` with what it stands on."""
        batch = super().__new__(cls, size)
        batch.assumed = assumed
        return batch

    def __reduce__(self) -> tuple[type[Self], tuple[int, list[AssumedValue]]]:
        return type(self), (int(self), self.assumed)


def fits(
    program: Callable[[], Any],
    device: str | FakeGPU = "H100-80GB",
    *,
    lines: bool = False,
    values: str = "raise",
) -> Fit:
    """Runs `program` on a fake GPU and tells whether it fits there.

    Args:
        program: Builds the model and the optimizer on "cuda", and runs two steps or more: the state of the optimizer is
            allocated in the first. It is called inside of `fake_mode(gpu=device)`, so no GPU is needed.
        device: A description, or the name of one.
        lines: As of `track_memory()`.
        values: What becomes of reading values that are not known: `raise` an error, or `assume` some, which are listed
            in `Fit.assumed`. Policies for masks and for routing may follow, as in `assume,masks=half,routing=same`:
            docs/how_to/dry_runs.md, "Values".

    Raises:
        RuntimeError: There are real CUDA devices: hide them (`CUDA_VISIBLE_DEVICES=`).
        ValueError: The device is unknown, or the policy for values.
        Exception: What `program` raises, other than `torch.OutOfMemoryError`.

    Example:
        >>> def make_layer():
        ...     return torch.nn.Linear(50_000, 50_000, device="cuda")
        >>> bool(fits(make_layer, "A100-40GB"))
        True
    """
    gpu = FakeGPU(device) if isinstance(device, str) else device
    error = None
    with fake_mode(gpu=gpu):
        if any(torch.cuda.memory_allocated(i) for i in range(gpu.count)):
            gc.collect()  # what another program has left in cycles would count
    with (
        fake_mode(gpu=gpu),
        carry_blocks_to_threads(),
        track_memory(lines=lines) as memory,
        assuming_values(values) as assumed,
    ):
        try:
            program()
        except torch.OutOfMemoryError as raised:
            error = raised.with_traceback(None)  # the frames hold what was allocated
    peak = memory.peak(of_reserved=True).reserved if memory.devices else 0
    return Fit(error is None, peak, gpu.memory - gpu.context, memory, error, assumed.sites)


def max_batch(
    make_step: Callable[[int], Callable[[], Any]],
    device: str | FakeGPU = "H100-80GB",
    *,
    steps: int = 2,
    multiple_of: int = 1,
    limit: int = 2**20,
    values: str = "raise",
) -> MaxBatch:
    """Finds the largest batch with which a step fits on a fake GPU.

    Args:
        make_step: Called with a size of the batch, builds the model, the optimizer and the batch on "cuda", and returns
            a function that runs one step.
        device: A description, or the name of one.
        steps: How often the step is run.
        multiple_of: Only multiples of it are tried.
        limit: The largest size that is tried.
        values: As of `fits()`.

    Returns:
        The size, or 0 if not even `multiple_of` fits, with the values that were assumed: `MaxBatch.assumed`.

    Raises:
        RuntimeError: As of `fits()`.
        ValueError: The device is unknown, or a number is not positive.
    """
    if min(steps, multiple_of) < 1:
        raise ValueError(f"`steps` ({steps}) and `multiple_of` ({multiple_of}) were expected to be 1 or more.")

    assumed: dict[int, list[AssumedValue]] = {}

    def fits_with(batch: int) -> bool:
        def program() -> None:
            step = make_step(batch)
            for _ in range(steps):
                step()

        fit = fits(program, device, values=values)
        assumed[batch] = fit.assumed
        return fit.fits

    good, bad = 0, 1
    while bad * multiple_of <= limit and fits_with(bad * multiple_of):
        good, bad = bad, 2 * bad
    bad = min(bad, limit // multiple_of + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits_with(middle * multiple_of) else (good, middle)
    size = good * multiple_of
    return MaxBatch(size, assumed.get(size or multiple_of, []))
