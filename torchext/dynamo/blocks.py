"""Blocks of inference mode in traced code. `results` handles their tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import ContextWrappingVariable
from torch._dynamo.variables.tensor import TensorVariable

from .. import _C, inference
from ..internals.calls import run_in_block
from .results import Mode, results_of
from .variables import FunctionOfOurs, GuardClass, break_graph, guard_attributes, guard_class, inline

__all__ = ["BY_OBJECT", "BY_TYPE"]

Translator = Any
Block = _C.InferenceBlock | _C.NormalTensorsBlock


class BlockVariable(ContextWrappingVariable):
    """A block. While Dynamo traces, only its grad mode applies, because Dynamo's fakes are not inference tensors."""

    def __init__(self, block: Block, **options: Any) -> None:
        arguments = (block.mode, block.trace) if isinstance(block, _C.InferenceBlock) else ()
        super().__init__(target_values=arguments, **options)
        self.block = block
        self.open: list[_OpenBlock] = []

    def enter(self, tx: Translator) -> VariableTracker:
        """Enter the block."""
        self.open.append(_OpenBlock(tx, self.block))
        return ConstantVariable.create(None)

    def exit(self, tx: Translator, *args: VariableTracker) -> VariableTracker:
        """Leave the innermost block."""
        self.open.pop().close()
        return ConstantVariable.create(None)

    def call_function(self, tx: Translator, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        """Decorate a function that the traced code has made."""
        return inline(tx, run_in_block, [self, *args], kwargs)

    def python_type(self) -> type:
        """Return the type of the block."""
        return type(self.block)

    def module_name(self) -> str:
        """Return the module from which Dynamo recreates the block after a graph break."""
        return "torchext.inference"

    def fn_name(self) -> str:
        """Return the function that recreates the block from `target_values`."""
        return "_make_block" if isinstance(self.block, _C.InferenceBlock) else "normal_tensors"


class _OpenBlock:
    def __init__(self, tx: Translator, block: Block) -> None:
        if tx.output.current_tracer.parent is not None:
            break_graph(
                "block of inference mode in a higher-order operator",
                "Inference tensors made in a branch, a body or a checkpoint cannot be determined from outside.",
            )
        self._results = results_of(tx.output)
        self._mode_around = self._results.mode
        self._grad_mode_around = torch.is_grad_enabled()
        self._is_open = True
        tx.output.add_cleanup_hook(self._restore)
        mode, is_traced = (block.mode, block.trace) if isinstance(block, _C.InferenceBlock) else (None, False)
        torch._C._set_grad_enabled(mode is False)
        self._node = self._results.enter(mode, is_traced)

    def close(self) -> None:
        self._restore()
        self._results.exit(self._node, self._mode_around)

    def _restore(self) -> None:
        if self._is_open:
            torch._C._set_grad_enabled(self._grad_mode_around)
            self._is_open = False


class BlockClass(GuardClass):
    """The classes `torchext.inference.inference_mode` and `normal_tensors`."""

    def variable(self, guard: Block) -> VariableTracker:
        """Return the variable for a block."""
        return BlockVariable(guard)


def _wrap_inference_block(builder: Any, value: Block) -> VariableTracker:
    guard_attributes(builder, ("mode", "trace"))
    return BlockVariable(value, source=builder.source)


def _wrap_normal_tensors(builder: Any, value: Block) -> VariableTracker:
    guard_attributes(builder, ())
    return BlockVariable(value, source=builder.source)


def _wrap_class(builder: Any, value: type) -> VariableTracker:
    guard_class(builder)
    return BlockClass(value, source=builder.source)


def _to_normal(tx: Translator, obj: VariableTracker) -> VariableTracker:
    """Trace `to_normal()` of tensors that the traced code has made, alone or in a list or a tuple."""
    tensors = [obj] if isinstance(obj, TensorVariable) else getattr(obj, "items", None)
    if not isinstance(tensors, list) or not all(_is_made_here(tensor) for tensor in tensors):
        break_graph(
            "to_normal() of an input of the compiled code",
            "Autograd must record that a tensor becomes normal: call to_normal() before the compiled code.",
        )
    for tensor in tensors:
        if not results_of(tx.output).make_normal(tensor.as_proxy().node):
            break_graph(
                "to_normal() of a tensor that shares memory with another one",
                "The tensor would need new memory, which a graph cannot express: call to_normal() after compiled code.",
            )
    return obj


def _is_mode_enabled(tx: Translator) -> VariableTracker:
    mode = results_of(tx.output).mode
    if mode is Mode.AROUND:
        break_graph(
            "is_inference_mode_enabled() outside of the graph's blocks",
            "Dynamo traces outside of inference mode and does not record the mode in which the code is called.",
        )
    return ConstantVariable.create(mode is Mode.INFERENCE)


def _is_made_here(variable: VariableTracker) -> bool:
    return isinstance(variable, TensorVariable) and variable.source is None


BY_TYPE: dict[type, Any] = {
    inference.inference_mode: _wrap_inference_block,
    inference.normal_tensors: _wrap_normal_tensors,
}
BY_OBJECT = [
    (inference.inference_mode, _wrap_class),
    (inference.normal_tensors, _wrap_class),
    (inference.to_normal, FunctionOfOurs.wrap(_to_normal)),
    (_C.is_inference_mode_enabled, FunctionOfOurs.wrap(_is_mode_enabled)),
]
