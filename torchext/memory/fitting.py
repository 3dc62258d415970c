"""Whether a program fits on a GPU."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isinf
from typing import Any, TypeVar

import torch

from ..descriptions import DEFAULT_VALUES, as_fake_gpu
from ..errors import TorchextWarning
from ..fake import FakeGPU, fake_mode, threads_inherit_blocks
from ..fake.cuda.compiler import compile_observers
from ..fake.values import AssumedValue, ValuePolicy, as_policy, assuming_values
from ..internals.document import Document, Table
from ..internals.text import in_units, plain
from .tracking import TrackedMemory, track_memory

__all__ = ["Fit", "MaxBatch", "check_types", "fits", "max_batch", "measure", "one_gpu"]

T = TypeVar("T")

NAME_A_MODEL = 'Pass the name of a model, such as gpu="H100-80GB", or FakeGPU(name, count=...) for several devices.'


@dataclass(frozen=True, eq=False, repr=False)
class Fit(Document):
    """Whether a program fits, and the memory that it needs. True in conditions if it fits.

    Attributes:
        fits: Whether it ran to its end.
        peak_reserved: The peak of the bytes reserved on the GPU; if it did not fit, until then. Of several GPUs, the
            highest; 0 if nothing was allocated on a GPU.
        capacity: The bytes that a program can allocate there; infinite without a limit.
        memory: The tracked memory.
        error: The error of the GPU, if it did not fit.
        assumed: The reads of values that do not exist, and the values that the program got instead.
        gpu: The name of the GPU.
    """

    fits: bool
    peak_reserved: int
    capacity: float
    memory: TrackedMemory
    error: torch.OutOfMemoryError | None = None
    assumed: list[AssumedValue] = field(default_factory=list)
    gpu: str = ""

    @property
    def peak_allocated(self) -> int:
        """The peak of the bytes in use on the GPU, without fragmentation."""
        return max((self.memory.peak_allocated(gpu).allocated for gpu in _gpus(self.memory)), default=0)

    @property
    def headroom(self) -> float:
        """`capacity - peak_reserved`, in bytes. If it did not fit, the request that failed (`error`) is not counted."""
        return self.capacity - self.peak_reserved

    def __bool__(self) -> bool:
        return self.fits

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("A Fit cannot be copied or pickled, because it refers to the tracked memory. Use to_dict().")

    def __repr__(self) -> str:
        answer = "fits" if self.fits else "does not fit"
        return (
            f"Fit({answer}: {in_units(self.peak_reserved)} reserved and {in_units(self.peak_allocated)} allocated at "
            f"the peak, {self._limit}{f' on {self.gpu}' if self.gpu else ''}{self._assumptions})"
        )

    @property
    def _limit(self) -> str:
        return "no limit" if isinf(self.capacity) else f"of {in_units(int(self.capacity))}"

    @property
    def _assumptions(self) -> str:
        places = len(self.assumed)
        return f"; values were assumed at {places} place{'s' if places > 1 else ''}" if places else ""

    def _parts(self) -> list[Table]:
        sizes = {"peak_reserved": self.peak_reserved, "peak_allocated": self.peak_allocated}
        rows = [*zip(sizes, map(in_units, sizes.values()), strict=True), ("capacity", self._limit.removeprefix("of "))]
        return [Table(("fits", "yes" if self.fits else "no"), rows)]

    def to_dict(self) -> dict[str, Any]:
        """Return the answer, sizes in bytes, the error and the tracked memory as plain values."""
        names = ("fits", "gpu", "peak_reserved", "peak_allocated", "capacity", "headroom", "error", "assumed", "memory")
        found = {name: plain(getattr(self, name)) for name in names}
        return found if not isinf(self.capacity) else {**found, "capacity": None, "headroom": None}  # as in JSON


@dataclass(frozen=True)
class MaxBatch(Document):
    """The size of the largest batch that fits.

    It is true in conditions if any batch fits, equals the size, and is an index, as for `range()`.

    Attributes:
        size: The size, or 0 if no batch fits.
        assumed: The reads of values that do not exist, in the run with this size, or for 0 with the smallest size, and
            the values that the program got instead.
    """

    size: int
    assumed: tuple[AssumedValue, ...] = ()

    def __bool__(self) -> bool:
        return self.size > 0

    def __index__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MaxBatch):
            return (self.size, self.assumed) == (other.size, other.assumed)
        return self.size == other if isinstance(other, int) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.size)

    def _parts(self) -> list[str]:
        return [str(self.size)]


def fits(
    program: Callable[[], Any],
    gpu: str | int | FakeGPU = "H100-80GB",
    *,
    trace: bool = False,
    values: str | ValuePolicy = DEFAULT_VALUES,
) -> Fit:
    """Run `program` on a fake GPU and return whether it fits there.

    Args:
        program: Builds the model and the optimizer on "cuda", and runs at least two steps: the first one allocates the
            state of the optimizer. It is called inside `fake_mode(gpu=gpu)`, so no GPU is needed.
        gpu: The name of a model, a description, or a number of devices, which have no memory limit.
        trace: As for `track_memory()`.
        values: How to answer reads of values that do not exist: `raise` an error, or `assume` some, which are listed in
            `Fit.assumed`. Policies for masks and for routing may follow, as in `assume,masks=half,routing=same`. A
            `ValuePolicy`, or its text:
            docs/how_to/dry_runs.md, "Choose values that do not exist".

    Warns:
        TorchextWarning: The program fits, but has allocated no memory on the GPU, or the GPU has no limit.

    Raises:
        RuntimeError: This machine has CUDA devices. Hide them (`CUDA_VISIBLE_DEVICES=`).
        TypeError: `program` is not callable, or another argument has the wrong type.
        ValueError: The model, or the policy for values, is unknown.
        Exception: Errors of `program`, other than `torch.OutOfMemoryError`.

    Example:
        >>> fits(lambda: torch.empty(2**30, 8, device="cuda"), "H100")
        Fit(fits: 32.00 GiB reserved and 32.00 GiB allocated at the peak, of 79.20 GiB on NVIDIA H100 80GB HBM3)
    """
    check_types("fits", "a function that runs the program", program, values)
    fit = measure(program, one_gpu(gpu), trace=trace, values=values)
    if isinf(fit.capacity):
        warnings.warn(
            f"fits(): {gpu!r} has no memory limit, so the result is not about a GPU. {NAME_A_MODEL}",
            TorchextWarning,
            stacklevel=2,
        )
    if fit and not fit.peak_reserved:
        _warn_of_empty_gpu("fits", fit.gpu)
    return fit


def _warn_of_empty_gpu(function: str, gpu: str) -> None:
    warnings.warn(
        f"{function}(): the program has allocated no memory on {gpu}, so the result is not about that GPU. "
        'Construct the model and its inputs on "cuda" in the program.',
        TorchextWarning,
        stacklevel=3,
    )


def measure(
    program: Callable[[], T],
    gpu: FakeGPU,
    *,
    trace: bool = False,
    values: str | ValuePolicy = DEFAULT_VALUES,
    afterwards: Callable[[T], object] = lambda result: None,
) -> Fit:
    """Run `program` on a fake GPU, as `fits()` does.

    Args:
        program: As for `fits()`.
        gpu: The GPU.
        trace: As for `fits()`.
        values: As for `fits()`.
        afterwards: Called on the GPU with the result of `program` if that fits. Its memory is not part of the answer.
    """
    error = None
    with fake_mode(gpu=gpu):
        if any(torch.cuda.memory_allocated(i) for i in range(gpu.count)):
            gc.collect()  # cycles that an earlier program has left would count
    with (
        fake_mode(gpu=gpu),
        threads_inherit_blocks(),
        _forgetting_compiled_code(),
        assuming_values(values) as assumed,
    ):
        with track_memory(trace=trace) as memory:
            try:
                result = program()
            except torch.OutOfMemoryError as raised:
                error = raised.with_traceback(None)  # its frames hold tensors
        if error is None:
            afterwards(result)
    peak = max((memory.peak_reserved(gpu).reserved for gpu in _gpus(memory)), default=0)
    capacity = gpu.memory - gpu.context if gpu.has_limit else inf
    return Fit(error is None, peak, capacity, memory, error, assumed.sites, gpu.name)


@contextmanager
def _forgetting_compiled_code() -> Iterator[None]:
    """Compile each program as in a new process: of other sizes in the next one, Dynamo would make dynamic code."""
    events: list[str] = []

    def observe(event: str, place: str) -> None:
        events.append(event)

    compile_observers.append(observe)
    try:
        yield
    finally:
        compile_observers.remove(observe)
        if events:
            torch._dynamo.reset()


def _gpus(memory: TrackedMemory) -> list[torch.device]:
    return [device for device in memory.devices if device.type == "cuda"]


def check_types(function: str, expected: str, program: object, values: str | ValuePolicy) -> None:
    """Raise TypeError or ValueError if `program` is not callable, or `values` is not a policy."""
    if not callable(program):
        raise TypeError(f"{function}() expected {expected}, got {type(program).__name__}.")
    as_policy(values)


def one_gpu(gpu: str | int | FakeGPU, *, must_have_limit: bool = False) -> FakeGPU:
    """Return the description of a GPU.

    Raises:
        ValueError: `gpu` is none, or has no memory limit although it must have one.
    """
    described = as_fake_gpu(gpu)
    if described is None:
        raise ValueError(f"`gpu`: expected a GPU, got {gpu!r}.")
    if must_have_limit and not described.has_limit:
        raise ValueError(f"`gpu`: expected a GPU with a memory limit, got {gpu!r}. {NAME_A_MODEL}")
    return described


def max_batch(
    make_step: Callable[[int], Callable[[], Any]],
    gpu: str | int | FakeGPU = "H100-80GB",
    *,
    steps: int = 2,
    multiple_of: int = 1,
    limit: int = 2**20,
    values: str | ValuePolicy = DEFAULT_VALUES,
) -> MaxBatch:
    """Find the largest batch with which a step fits on a fake GPU.

    Args:
        make_step: Called with a batch size, builds the model, the optimizer and the batch on "cuda", and returns a
            function that runs one step.
        gpu: As for `fits()`.
        steps: The number of steps to run.
        multiple_of: Try only multiples of this number.
        limit: The largest size to try.
        values: As for `fits()`.

    Warns:
        TorchextWarning: Steps fit, but allocate no memory on the GPU.

    Returns:
        The size, or 0 if `multiple_of` does not fit, with the values that were assumed.

    Raises:
        RuntimeError: As for `fits()`.
        TypeError: `make_step` or its result is not callable, or another argument has the wrong type.
        ValueError: The model is unknown, the GPU has no memory limit, a number is not positive, or `limit` is less than
            `multiple_of`.

    Example:
        >>> max_batch(lambda batch: lambda: torch.empty(batch, 2**28, device="cuda"), "H100")
        MaxBatch(size=79, assumed=())
    """
    if min(steps, multiple_of) < 1:
        raise ValueError(f"`steps` ({steps}) and `multiple_of` ({multiple_of}) were expected to be 1 or more.")
    if limit < multiple_of:
        raise ValueError(f"`limit` ({limit}) was expected to be at least `multiple_of` ({multiple_of}).")
    check_types("max_batch", "a function of a batch size that returns a step", make_step, values)
    described = one_gpu(gpu, must_have_limit=True)
    assumed: dict[int, list[AssumedValue]] = {}
    peaks: dict[int, int] = {}

    def fits_with(batch: int) -> bool:
        def program() -> None:
            step = make_step(batch)
            if not callable(step):
                raise TypeError(
                    f"max_batch(): `make_step` was expected to return a function that runs one step, got "
                    f"{type(step).__name__}."
                )
            for _ in range(steps):
                step()

        fit = measure(program, described, values=values)
        assumed[batch], peaks[batch] = fit.assumed, fit.peak_reserved
        return fit.fits

    good, bad = 0, 1
    while bad * multiple_of <= limit and fits_with(bad * multiple_of):
        good, bad = bad, 2 * bad
    bad = min(bad, limit // multiple_of + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits_with(middle * multiple_of) else (good, middle)
    size = good * multiple_of
    if size and not peaks[size]:
        _warn_of_empty_gpu("max_batch", described.name)
    return MaxBatch(size, tuple(assumed.get(size or multiple_of, ())))
