"""The source lines of inference tensors: `origin()`, and notes on errors that operators do not raise."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .. import _C
from ..internals.document import Document
from ..internals.leases import Lease, settle, while_marks_live
from ..internals.patching import Concerns, Function, patching_lock

__all__ = ["Origin", "are_all_blocks_traced", "origin", "trace_origins"]


@dataclass(frozen=True)
class Origin(Document):
    """The source line that made a tensor: the innermost line outside of PyTorch and torchext.

    Attributes:
        file: The file of the line.
        line: Its number.
        function: The name of its function.
    """

    file: str
    line: int
    function: str

    def _parts(self) -> list[str]:
        return [f"{self.file}:{self.line} in {self.function}"]


def origin(tensor: torch.Tensor) -> Origin | None:
    """Return the source line that made an inference tensor.

    Args:
        tensor: Any tensor. An inference tensor has an origin if an operator made it in `inference_mode(trace=True)` or
            after `trace_origins()`. A view that was made elsewhere has the origin of its base.

    Returns:
        The line. None for a normal tensor, for a tensor that was not traced, and for a tensor that was not made by an
        operator, such as the result of `torch.from_numpy()` or of a transform of `torch.func`.

    Raises:
        TypeError: `tensor` is not a tensor.

    Example:
        >>> with inference_mode(trace=True):
        ...     x = torch.ones(2)
        >>> print(origin(x))
        <...>:2 in <module>
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"origin() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    found = re.fullmatch(r"(.*):(\d+) in (.*)", _C.origin_of(tensor), re.DOTALL)
    return None if found is None else Origin(found[1], int(found[2]), found[3])


def trace_origins(enabled: bool = True) -> None:
    """Trace all blocks of inference mode in the process, or stop tracing them.

    This does for every block that any thread enters from now on, and for the innermost block of this thread, what
    `inference_mode(trace=True)` does for one block. It includes PyTorch's `torch.inference_mode`, but not C++'s
    `c10::InferenceMode`.

    Args:
        enabled: False to stop. Open blocks are still traced, and recorded lines are kept.
    """
    _C.trace_origins_in_blocks(enabled)
    _hold_while_tracing(enabled)
    if enabled and torch.is_inference_mode_enabled():
        _trace_here()


def are_all_blocks_traced() -> bool:
    """Return True after `trace_origins()`."""
    return _is_tracing_all


def _trace_here() -> None:
    _C.trace_origins_here()
    settle(is_urgent=True)


_while_all_blocks_trace = Lease("trace_origins() is on")
_is_tracing_all = False


def _hold_while_tracing(enabled: bool) -> None:
    global _is_tracing_all
    with patching_lock:
        if enabled and not _is_tracing_all:
            _while_all_blocks_trace.acquire()
        elif not enabled and _is_tracing_all:
            _while_all_blocks_trace.release()
        _is_tracing_all = enabled


@_while_all_blocks_trace.replaces(torch.inference_mode, "__enter__", reason="runs no operator when a block begins")
def _enter(original: Function, self: torch.inference_mode) -> None:
    original(self)
    if self.mode:
        _trace_here()  # until PyTorch's guard restores the keys of the thread


@_while_all_blocks_trace.replaces(torch.inference_mode, "__exit__", reason="runs no operator when a block ends")
def _exit(original: Function, self: torch.inference_mode, *error: Any) -> Any:
    result = original(self, *error)
    _C.drop_stale_demands()
    return result


# A class method, in Python before 2.15 and in C since then. `forward()` may have closed over inference tensors.
@while_marks_live.replaces(torch.autograd.Function, "apply", reason="checks saved tensors after forward() has returned")
@while_marks_live.replaces(
    torch.Tensor,
    "_version",
    reason="raises errors about inference tensors without calling an operator",
    concerns=Concerns.MARKS,
)
def _add_notes(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Add notes to errors that operators do not raise."""
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        _add_note(error, args)
        raise


def _add_note(error: RuntimeError, values: Iterable[Any]) -> None:
    if "nference tensor" not in str(error) or getattr(error, "__notes__", None):
        return
    lines = {_C.origin_of(value): None for value in values if isinstance(value, torch.Tensor)}
    lines.pop("", None)
    if lines and hasattr(error, "add_note"):  # Python 3.11
        error.add_note("The inference tensors among the arguments were created at\n  " + "\n  ".join(lines))
