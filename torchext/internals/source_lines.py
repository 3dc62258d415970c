"""Finds the line of the user's program that records an operator."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from .. import _C

__all__ = ["GENERATED", "is_users", "place_of", "tracing", "users_frame"]

GENERATED = str(Path(tempfile.gettempdir(), "torchext_compiled_"))
"""The first part of the names of folders of code that the compiler generates in a run with fakes."""

# A line in a model's constructor is more useful than the line in `torch/nn/modules/linear.py` that it leads to, or a
# line that torch.fx has generated.
_NOT_THE_USERS = (
    *(str(Path(file).parent) + os.sep for file in (torch.__file__, _C.__file__)),
    "<eval_with_key>",
    GENERATED,
)


@contextmanager
def tracing() -> Iterator[None]:
    """Record each operator on this thread together with the line of the program that caused it.

    That is the innermost line outside of PyTorch and torchext. `explain()` and errors about a recorded operator show
    it. Recording is several times slower in the block. `deferred_init(..., trace=True)` does the same for one call.

    Example:
        >>> with tracing():
        ...     model = deferred_init(torch.nn.Linear, 4, 4)
        >>> explain(model.bias)[0].source
        '...:2 in <module>'
    """
    _C.enter_tracing()
    try:
        yield
    finally:
        _C.leave_tracing()


def users_frame() -> FrameType | None:
    """Return the innermost frame outside of PyTorch and torchext, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_users(file: str) -> bool:
    """Return true unless a file belongs to PyTorch or torchext, or is generated."""
    return not file.startswith(_NOT_THE_USERS)


def place_of(frame: FrameType | None) -> str:
    """Return the line of a frame as `file:line in function`, or an empty string if there is no frame."""
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _current_line() -> str:
    return place_of(users_frame())


_C.provide("current_line", _current_line)
