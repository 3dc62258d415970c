"""A warning about backward passes inside autocast regions.

The operators of a backward pass run in the dtypes of the forward pass. Inside a region they would also autocast,
because the autograd engine takes the state of the thread. PyTorch's documentation warns about this; its code does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from ..errors import TorchextWarning
from ..tools.leases import while_autocasting
from ..tools.source_lines import users_frame

__all__: list[str] = []

_warned: dict[tuple[str, int], object] = {}

# The position of `create_graph` in the arguments of `_engine_run_backward()` after the outputs.
CREATE_GRAPH = 2


def _patch_backward() -> None:
    """Patch backward passes to check whether they are in a region."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def _engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if _C.is_in_enabled_region() and not _is_of_a_transform():
                _warn()
            creates_graph = args[CREATE_GRAPH] if len(args) > CREATE_GRAPH else kwargs.get("create_graph", False)
            is_number = isinstance(creates_graph, int)  # the engine raises for other types
            return _C.call_in_backward(is_number and bool(creates_graph), original, outputs, *args, **kwargs)

        return _engine_run_backward

    while_autocasting.patch(
        torch.autograd.graph, "_engine_run_backward", make, "runs no operator when a backward pass begins"
    )


def _is_of_a_transform() -> bool:
    """Return True if no line of the program runs between forward and backward.

    In `torch.func.grad` they are one call. `torch.compile` traces both when the first one is called.
    """
    is_compiling = torch._guards.TracingContext.try_get() is not None
    return is_compiling or torch._C._functorch.peek_interpreter_stack() is not None


def _warn() -> None:
    """Warn once for each source line of the user."""
    frame = users_frame()
    if frame is None:
        return  # a thread started by a library
    line = (frame.f_code.co_filename, frame.f_lineno)
    this_call = object()
    if _warned.setdefault(line, this_call) is not this_call:  # of two threads, one is first
        return
    warnings.warn_explicit(
        f"{line[0]}:{line[1]} runs backward() inside an autocast region: the operators of the backward pass run in "
        "the dtypes of the forward pass, unless the region casts them again. Leave the region before it.",
        TorchextWarning,
        *line,
    )


while_autocasting.declare(_patch_backward)
