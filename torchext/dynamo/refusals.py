"""Functions that Dynamo calls instead of tracing, after a graph break that states the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import amp, inference
from ..tools.calls import begin_generator
from ..tools.frames import skip_frames
from ..tools.torch_release import DIFFERENCES
from .variables import FunctionOfOurs, break_graph

__all__ = ["BY_OBJECT", "disallow_in_graph"]

# Their effects cannot be part of a graph: they mark tensors, or query PyTorch's dispatcher.
NOT_TRACED: list[Any] = [
    amp.policy,
    amp.register_policy,
    amp.unwrap,
    amp.wrap,
    inference.check_dispatch_state,
    inference.origin,
    inference.trace_origins,
]


def disallow_in_graph() -> None:
    """Let Dynamo call these functions after a graph break, without compiling them."""
    for function in [*NOT_TRACED, inference.to_normal]:
        skip_frames(function.__code__, with_callees=True)


def _breaking(function: Any) -> Callable[..., Any]:
    def trace(tx: Any, *args: Any, **kwargs: Any) -> Any:
        break_graph(f"{function.__name__}()", f"{function.__name__}() acts on objects that a graph cannot contain.")

    return FunctionOfOurs.wrap(trace)


def _break_at_generator(tx: Any) -> Any:
    break_graph(
        "decorated generator",
        "Before 2.14 Dynamo loses the return value of a generator, or cannot resume it by `send()`.",
    )


BY_OBJECT = [(function, _breaking(function)) for function in NOT_TRACED]
if DIFFERENCES["dynamo_loses_generators"].applies:
    BY_OBJECT.append((begin_generator, FunctionOfOurs.wrap(_break_at_generator)))
