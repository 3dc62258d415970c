"""AmpTensors in traced code.

Dynamo traces with fakes, which get the marks of the tensors that they represent. Operators therefore treat them like
the real tensors, and the dtypes that Dynamo records are those of eager code. AOTAutograd traces the graph again with
other fakes, which have no marks. So the operators of a graph with AmpTensors are called as they were traced, without a
backend.

Compiled code in a self-cleaning region autocasts as in any other region. Backends allocate results without an operator,
so these results get the marks of their fakes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.guards import install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.builder import VariableBuilder

from .. import _C
from ..tools.leases import while_marks_live
from .results import bypass_package, results_of
from .variables import break_graph

__all__ = ["declare"]

WRAPPED = 1  # one of the kinds of `_C.amp_kind()`


def declare() -> None:
    """Let Dynamo distinguish AmpTensors from ordinary tensors while AmpTensors exist."""
    while_marks_live.declare(_patch_inputs, _patch_results)


def _patch_inputs() -> None:
    while_marks_live.patch(
        VariableBuilder, "wrap_tensor", _marking, "makes fakes without the marks of the original tensors"
    )


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrap_tensor(self: Any, value: torch.Tensor) -> Any:
        variable = original(self, value)
        kind = _C.amp_kind(value)
        if kind:
            _note_input(self, variable, value, kind)
        return variable

    return wrap_tensor


def _note_input(builder: Any, variable: Any, value: torch.Tensor, kind: int) -> None:
    if builder.tx.output.export:
        break_graph(
            "AmpTensor in torch.export",
            "An exported program has no AmpTensors: export it with amp.autocast() in it.",
        )
    results = results_of(builder.tx.output)
    if kind == WRAPPED:
        results.call_operators("receives AmpTensors")
    else:
        results.note_unclean_input(value.device.type)
    fake = variable.as_proxy().node.meta["example_value"]
    _C.make_amp_like(fake, value)
    # PyTorch keeps the fakes of some inputs permanently
    builder.tx.output.add_cleanup_hook(lambda: _C.unwrap_amp(fake))
    install_guard(builder.source.make_guard(_guarding(kind)))


def _patch_results() -> None:
    while_marks_live.patch(OutputGraph, "call_user_compiler", _marking_results, "allocates results without an operator")


def _marking_results(original: Callable[..., Any]) -> Callable[..., Any]:
    def call_user_compiler(self: Any, graph_module: Any, inputs: Any) -> Any:
        compiled = original(self, graph_module, inputs)
        if self.export or not _C.is_in_self_cleaning_region():
            return compiled
        bypass_package(self)
        return _marking_as(_kinds_of_results(graph_module), compiled)

    return call_user_compiler


def _kinds_of_results(graph_module: Any) -> list[int]:
    (results,) = graph_module.graph.output_node().args
    fakes = [getattr(result, "meta", {}).get("example_value") for result in results]
    return [_C.amp_kind(fake) if isinstance(fake, torch.Tensor) else 0 for fake in fakes]


def _marking_as(kinds: list[int], compiled: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        results = compiled(*args)
        for result, kind in zip(results, kinds, strict=True):
            if isinstance(result, torch.Tensor) and _C.amp_kind(result) != kind:
                _C.set_amp_kind(result, kind)
        return results

    return run


def _guarding(kind: int) -> Callable[[Any, Any], None]:
    """Add the guard that Dynamo lacks: it guards a tensor's keys, but not the kind of mark or the deciding region."""

    def guard_amp_kind(builder: Any, guard: Any) -> None:
        is_region_deciding = _C.is_region_deciding()  # the state around the code: guards are made after tracing

        def is_same(tensor: torch.Tensor) -> bool:
            return _C.amp_kind(tensor) == kind and _C.is_region_deciding() is is_region_deciding

        manager = builder.get_guard_manager(guard)
        manager.add_lambda_guard(is_same, [f"torchext: is an AmpTensor of kind {kind}"], guard.user_stack)

    return guard_amp_kind
