"""Which line of the user's program records an operator."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from .. import _C

__all__ = ["place_of", "tracing", "users_frame"]

# A line in a model's constructor says more than the one in `torch/nn/modules/linear.py` that it leads to, or one that
# torch.fx has generated.
_NOT_THE_USERS = (*(str(Path(file).parent) + os.sep for file in (torch.__file__, _C.__file__)), "<eval_with_key>")


@contextmanager
def tracing() -> Iterator[None]:
    """Lets every operator be recorded, on this thread, with the line of the program that it was recorded for.

    That is the innermost line that is neither PyTorch's nor torchext's. `explain()` shows it, and so do errors about a
    recorded operator. Recording takes several times as long meanwhile. `deferred_init(..., trace=True)` does the same
    for one call.

    Example:
        >>> with tracing():
        ...     model = deferred_init(torch.nn.Linear, 4, 4)
        ...     model.half()
    """
    _C.enter_tracing()
    try:
        yield
    finally:
        _C.leave_tracing()


def users_frame() -> FrameType | None:
    """The innermost frame of the user's program, which is neither PyTorch's nor torchext's; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame


def place_of(frame: FrameType | None) -> str:
    """Return the line of a frame as `file:line in function`, or an empty string if there is no frame."""
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _current_line() -> str:
    return place_of(users_frame())


_C.provide("current_line", _current_line)
