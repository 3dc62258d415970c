"""Our guards in traced code: autocast regions, with AmpTensors, and blocks of inference mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._dynamo.guards import install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import ContextWrappingVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from .. import _C, amp, inference
from ..internals.calls import run_in_block
from ..internals.leases import while_marks_live
from ..internals.patching import Function
from .results import (
    FunctionOfOurs,
    Guard,
    GuardClass,
    Mode,
    break_graph,
    bypass_package,
    enter,
    guard_attributes,
    guard_class,
    inline,
    leave,
    results_of,
)

__all__ = ["BLOCKS_BY_OBJECT", "BLOCKS_BY_TYPE", "BY_OBJECT", "BY_TYPE", "declare"]

Translator = Any

ARGUMENTS = ("device_type", "dtype", "enabled", "cache_enabled", "self_cleaning")


class RegionVariable(ContextWrappingVariable):
    """A region. It is really open while Dynamo traces, so that reads of the autocast state are correct.

    In the graph it is `torch.amp._enter_autocast()`, which backends and `torch.export` support.
    """

    def __init__(self, region: _C.AutocastRegion, **options: Any) -> None:
        super().__init__(target_values=region._arguments(), **options)
        self.region = region
        self.open: list[_OpenRegion] = []

    def enter(self, tx: Translator) -> VariableTracker:
        """Enter the region."""
        self.open.append(_OpenRegion(tx, self.region))
        return self

    def exit(self, tx: Translator, *args: VariableTracker) -> VariableTracker:
        """Leave the innermost region."""
        self.open.pop().close(tx)
        return ConstantVariable.create(None)

    def call_function(self, tx: Translator, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        """Decorate a function that the traced code has made."""
        is_enabled = ConstantVariable.create(self.region.enabled)
        return inline(tx, amp.in_region, [self, is_enabled, *args], kwargs)

    def is_outermost(self, tx: Translator) -> VariableTracker:
        """Return the result of `region._is_outermost()`. Dynamo guards the state that it depends on."""
        return ConstantVariable.create(self.region._is_outermost())

    def python_type(self) -> type:
        """Return the type of the region."""
        return type(self.region)

    def module_name(self) -> str:
        """Return the module from which Dynamo recreates the region after a graph break."""
        return "torchext.amp"

    def fn_name(self) -> str:
        """Return the function that recreates the region from `target_values`."""
        return "_make_region"


_amp: Any = torch.amp  # graphs use these functions although they are not exported


class _OpenRegion:
    """A region that is open in the graph, and while Dynamo traces."""

    def __init__(self, tx: Translator, region: _C.AutocastRegion) -> None:
        results = results_of(tx.output)  # restores the state after errors
        if region.self_cleaning:
            _check_not_exported(tx)
            results.call_operators("enters a self-cleaning region")
        device_type = region.device_type or _C.autocast_device_type_in_use()
        around = torch.get_autocast_dtype(device_type)
        self._leave: Callable[[], None] | None = lambda: region.__exit__(None, None, None)
        region.__enter__()
        tx.output.add_cleanup_hook(self._close_in_earnest)
        state = State(
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )
        self._exit: Callable[..., None] | None = None
        if region.self_cleaning:
            self._node, self._exit = _call(tx, enter_self_cleaning, *state), leave
        elif _has_device_type(device_type):
            self._node, self._exit = _call(tx, _amp._enter_autocast, *state), _amp._exit_autocast
        # Like the region: NOTE [Autocast regions]. PyTorch's region would reuse the casts of the surrounding dtype.
        self._forgets_casts = state.dtype is not around and not tx.output.export
        self._forget_casts(tx)

    def close(self, tx: Translator) -> None:
        self._close_in_earnest()
        if self._exit is not None:
            _call(tx, self._exit, self._node)
            self._forget_casts(tx)

    def _close_in_earnest(self) -> None:
        if self._leave is not None:
            self._leave()
            self._leave = None

    def _forget_casts(self, tx: Translator) -> None:
        if self._forgets_casts:
            _call(tx, torch.clear_autocast_cache)


class State(NamedTuple):
    """The arguments of `torch.autocast`, in order."""

    device_type: str
    dtype: torch.dtype
    is_enabled: bool
    is_caching: bool


def enter_self_cleaning(device_type: str, dtype: torch.dtype, is_enabled: bool, is_caching: bool) -> Guard:
    """Enters a self-cleaning region, in a graph that no backend compiles."""
    return enter(
        _C.AutocastRegion(device_type, dtype=dtype, enabled=is_enabled, cache_enabled=is_caching, self_cleaning=True)
    )


def _check_not_exported(tx: Translator) -> None:
    if tx.output.export:
        break_graph(
            "self-cleaning region in torch.export",
            "An exported program has no AmpTensors: export it with amp.autocast(), and cast the tensors that leave the "
            "region.",
        )


def _call(tx: Translator, function: Callable[..., object], *args: Any) -> Any:
    return tx.output.create_node("call_function", function, args, {})


def _has_device_type(device_type: str) -> bool:
    """Return true if the machine has the device type. Otherwise `torch.autocast` warns, and no tensors can be there."""
    return device_type != "cuda" or not torch.cuda.amp.common.amp_definitely_not_available()


class RegionClass(GuardClass):
    """The class `torchext.amp.autocast`."""

    def variable(self, guard: _C.AutocastRegion) -> VariableTracker:
        """Return the variable for a region."""
        return RegionVariable(guard)


def _wrap_region(builder: Any, value: _C.AutocastRegion) -> VariableTracker:
    guard_attributes(builder, ARGUMENTS)
    return RegionVariable(value, source=builder.source)


def _wrap_region_class(builder: Any, value: type) -> VariableTracker:
    guard_class(builder)
    return RegionClass(value, source=builder.source)


def _device_type_in_use(tx: Translator) -> VariableTracker:
    return ConstantVariable.create(_C.autocast_device_type_in_use())


def _can_autocast(tx: Translator, device_type: VariableTracker) -> VariableTracker:
    return ConstantVariable.create(amp.can_autocast(device_type.as_python_constant()))


class AmpTensorClass(UserDefinedClassVariable):
    """The class `AmpTensor`. For Dynamo a tensor is an instance of its type, which is not AmpTensor."""

    def as_python_constant(self) -> Any:
        """Raise a graph break: `isinstance()` calls this."""
        break_graph("isinstance() of AmpTensor", "Dynamo does not call AmpTensor.__instancecheck__(): call is_amp().")


def _wrap_amp_tensor_class(builder: Any, value: type) -> VariableTracker:
    guard_class(builder)
    return AmpTensorClass(value, source=builder.source)


def _is_amp(tx: Translator, tensor: VariableTracker) -> VariableTracker:
    if not isinstance(tensor, TensorVariable):
        break_graph("is_amp() of an object other than a tensor", "The program raises an error there.")
    return ConstantVariable.create(_C.is_amp(tensor.as_proxy().node.meta["example_value"]))


BY_TYPE: dict[type, Any] = {amp.autocast: _wrap_region, _C.AutocastRegion: _wrap_region}
BY_OBJECT: list[tuple[Any, Any]] = [
    (amp.autocast, _wrap_region_class),
    (_C.AutocastRegion, _wrap_region_class),
    (amp.is_outermost, FunctionOfOurs.wrap(lambda tx, region: region.is_outermost(tx))),
    (amp.AmpTensor, _wrap_amp_tensor_class),
    (_C.is_amp, FunctionOfOurs.wrap(_is_amp)),
    (amp.can_autocast, FunctionOfOurs.wrap(_can_autocast)),
    (_C.autocast_device_type_in_use, FunctionOfOurs.wrap(_device_type_in_use)),
]


# ---- AmpTensors
#
# Dynamo traces with fakes, which get the marks of the tensors that they represent. Operators therefore treat them like
# the real tensors, and the dtypes that Dynamo records are those of eager code. AOTAutograd traces the graph again with
# other fakes, which have no marks. So the operators of a graph with AmpTensors are called as they were traced, without
# a backend.
#
# Compiled code in a self-cleaning region autocasts as in any other region. Backends allocate results without an
# operator, so these results get the marks of their fakes.


WRAPPED = 1  # one of the kinds of `_C.amp_kind()`


def declare() -> None:
    """Let Dynamo distinguish AmpTensors from ordinary tensors while AmpTensors exist."""
    while_marks_live.replaces(
        VariableBuilder, "wrap_tensor", reason="makes fakes without the marks of the original tensors"
    )(_wrap_tensor)
    while_marks_live.replaces(OutputGraph, "call_user_compiler", reason="allocates results without an operator")(
        _call_user_compiler
    )


def _wrap_tensor(original: Function, self: Any, value: torch.Tensor) -> Any:
    variable = original(self, value)
    kind = _C.amp_kind(value)
    if kind:
        _note_input(self, variable, value, kind)
    return variable


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


def _call_user_compiler(original: Function, self: Any, graph_module: Any, inputs: Any) -> Any:
    compiled = original(self, graph_module, inputs)
    if self.export or not _C.is_in_self_cleaning_region():
        return compiled
    bypass_package(self)
    return _marking_as(_kinds_of_results(graph_module), compiled)


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


# ---- Blocks of inference mode. `results.py` handles their tensors


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


def _wrap_block_class(builder: Any, value: type) -> VariableTracker:
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


BLOCKS_BY_TYPE: dict[type, Any] = {
    inference.inference_mode: _wrap_inference_block,
    inference.normal_tensors: _wrap_normal_tensors,
}
BLOCKS_BY_OBJECT: list[tuple[Any, Any]] = [
    (inference.inference_mode, _wrap_block_class),
    (inference.normal_tensors, _wrap_block_class),
    (inference.to_normal, FunctionOfOurs.wrap(_to_normal)),
    (_C.is_inference_mode_enabled, FunctionOfOurs.wrap(_is_mode_enabled)),
]
