"""The assertion that a program fits on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..fake import FakeGPU
from ..internals.text import bytes_of, readable
from ..memory import Fit
from ..memory.fitting import check_types, measure, one_gpu

__all__ = ["assert_fits"]


def assert_fits(
    program: Callable[[], Any],
    gpu: str | int | FakeGPU = "H100-80GB",
    *,
    headroom: int | str = 0,
    values: str = "raise",
) -> Fit:
    """Raise AssertionError unless `program` fits on a fake GPU with the headroom. See the fixture `assert_fits`."""
    __tracebackhide__ = True  # pytest shows the line of the test
    check_types("assert_fits", "a function that runs the program", program, values)
    spare = bytes_of(headroom, "headroom") if headroom else 0
    fit = measure(program, one_gpu(gpu), values=values)
    if not fit.fits:
        raise AssertionError(f"{fit}\n{fit.error}\n\n{fit.memory}")
    if not fit.peak_reserved:
        raise AssertionError(f'The program has allocated no memory on {fit.gpu}. Construct the model on "cuda" in it.')
    if fit.headroom < spare:
        raise AssertionError(
            f"{fit}\nA headroom of {readable(spare)} was expected, got {readable(fit.headroom)}.\n\n{fit.memory}"
        )
    return fit
