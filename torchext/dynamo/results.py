"""The parts that our guards share in traced code: guards in graphs, inference tensors as results, and variables."""

from __future__ import annotations

import enum
import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch.fx import GraphModule, Node

from .. import _C, amp, inference
from ..errors import TorchextWarning
from ..inference import are_all_blocks_traced, origin
from ..internals.calls import begin_generator, skip_frames
from ..internals.held_tensors import storage_of, tensors_in
from ..internals.patching import DIFFERENCES

__all__ = [
    "BY_OBJECT",
    "FunctionOfOurs",
    "Guard",
    "GuardClass",
    "Mode",
    "Results",
    "break_graph",
    "bypass_package",
    "constants",
    "disallow_in_graph",
    "enter",
    "enter_block",
    "guard_attributes",
    "guard_class",
    "inline",
    "is_function",
    "leave",
    "results_of",
]


# ---- Guards that graphs enter when they run, and cleanup after an error
#
# A graph enters and leaves a guard by two of its operators. Backends that call operators one by one skip the second if
# one in between raises an error.


Guard = _C.InferenceBlock | _C.NormalTensorsBlock | _C.AutocastRegion
Compiled = Callable[..., Any]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.guards: list[Guard] = []


_entered = _Thread()


def enter(guard: Guard) -> Guard:
    """Enter one of our guards, in a graph."""
    guard.__enter__()
    _entered.guards.append(guard)
    return guard


def leave(guard: Guard) -> None:
    """Leave the guard, in a graph."""
    _entered.guards.remove(guard)
    guard.__exit__(None, None, None)


def _restoring_state(compiled: Compiled) -> Compiled:
    """Return a function that calls `compiled` and restores the thread's state if that raises an error.

    Must be called in the state in which the code runs: the code is compiled for this state only.
    """
    if hasattr(compiled, "serialize_compile_artifacts"):
        return compiled  # AOTAutograd compiles stored code, which enters nothing
    restore = _state_here()

    def run(*args: Any) -> Any:
        depth, count = _nesting(), len(_entered.guards)
        try:
            return compiled(*args)
        except BaseException:
            while len(_entered.guards) > count:
                _entered.guards.pop().__exit__(None, None, None)
            while _nesting() > depth:
                torch.autocast_decrement_nesting()
            for step in restore:
                step()
            raise

    return run


def _nesting() -> int:
    """Return the number of open regions, including PyTorch's."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _state_here() -> list[Callable[[], object]]:
    """Return the state that graphs change by PyTorch operators."""
    steps: list[Callable[[], object]] = [
        partial(torch._C._set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
    ]
    for device_type in {"cpu", _C.autocast_device_type_in_use()}:
        steps.append(partial(torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type)))
        steps.append(partial(torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type)))
    return steps


# ---- Results of compiled code that are inference tensors where those of eager code would be
#
# Code compiled by AOTAutograd allocates its tensors in the mode in which it is called. Therefore `torch.inference_mode`
# in a graph has normal tensors as results, if it can be compiled at all: views of tensors that require a gradient
# cannot. Our block is only a grad mode in such a graph. While Dynamo traces, `Results` records the mode of each
# operator. A tensor is an inference tensor if the operator that made its storage was called in inference mode. The
# results are handled as follows:
#
# - If all operators were called in the same mode, the code runs in that mode, and its results are correct.
# - Otherwise the code runs outside of inference mode, and the results concerned are wrapped in inference tensors: on
#   the same storage, or on a copy where autograd may have saved the storage.
#
# The backend "eager" calls the operators as they were traced, so there the blocks stay in the graph.


class Mode(enum.Enum):
    """The mode in which an operator was called."""

    AROUND = "in no block of the graph: in the mode in which the compiled code is called"
    INFERENCE = "in inference mode"
    NORMAL = "in a block that is not in inference mode"


def enter_block(mode: bool | None, is_traced: bool) -> Guard:
    """Enter a block in a graph: inference mode (on or off), or, without a mode, normal tensors."""
    return enter(_C.NormalTensorsBlock() if mode is None else _C.InferenceBlock(mode, trace=is_traced))


class Results:
    """The recorded modes and blocks of one graph.

    Attributes:
        mode: The mode in which operators are called now.
    """

    def __init__(self, output: Any) -> None:
        self.mode: Mode = Mode.AROUND
        self._output = output
        self._is_traced = False
        self._modes: dict[Node, Mode] = {}
        self._grad_modes: dict[Node, bool] = {}  # for nodes that enter and leave blocks
        self._made_normal: dict[Node, Any] = {}  # the storages passed to `to_normal()`
        self._plan: _Plan | None = None
        self._why_not_compiled = ""
        self._unclean_on: set[str] = set()
        compiler = output.compiler_fn
        self._is_eager = _calls_operators(compiler)
        output.add_graph_finalizer(self._finish_graph)
        output.compiler_fn = self._calling(compiler)

    def enter(self, mode: bool | None, is_traced: bool) -> Node:
        """Record that a block begins, like `enter_block()`. The grad mode has already been set to that of the block."""
        self._note_modes()
        node: Node = self._output.create_node("call_function", enter_block, (mode, is_traced), {})
        self._grad_modes[node] = torch.is_grad_enabled()
        self.mode = Mode.INFERENCE if mode else Mode.NORMAL
        self._is_traced |= is_traced
        return node

    def exit(self, entered: Node, mode: Mode) -> None:
        """Record that the block which `entered` has begun ends. The grad mode has already been restored."""
        self._note_modes()
        node = self._output.create_node("call_function", leave, (entered,), {})
        self._grad_modes[node] = torch.is_grad_enabled()
        self.mode = mode

    def make_normal(self, tensor: Node) -> bool:
        """Record that a tensor of the graph becomes normal. Return false if another tensor shares its memory."""
        self._note_modes()
        value = tensor.meta["example_value"]
        shown = (other for node in self._output.graph.nodes for other in tensors_in(node.meta.get("example_value")))
        if any(other is not value and storage_of(other)[0] == storage_of(value)[0] for other in shown):
            return False
        node = self._output.create_node("call_function", _C.make_normal, ([tensor],), {})
        self._made_normal[node] = storage_of(value)[0]
        return True

    def call_operators(self, reason: str) -> None:
        """Run the graph without a backend, because its function does what `reason` states.

        The operators are called as they were traced, and blocks are entered. Warns unless the program requested it.
        """
        if not self._is_eager:
            self._is_eager = True
            self._why_not_compiled = reason

    def note_unclean_input(self, device_type: str) -> None:
        """Record that an input is a result of a self-cleaning region, which needs cleaning without autocast."""
        self._unclean_on.add(device_type)

    def _note_modes(self) -> None:
        for node in reversed(self._output.graph.nodes):
            if node in self._modes:
                return
            self._modes[node] = self.mode

    def _storages(self) -> dict[Any, Mode | None]:
        made: dict[Any, Mode | None] = {}
        for node in self._output.graph.nodes:
            mode = None if node.op in ("placeholder", "get_attr") else self._modes.get(node, self.mode)
            for tensor in tensors_in(node.meta.get("example_value")):
                made.setdefault(storage_of(tensor)[0], mode)
            if node in self._made_normal:
                made[self._made_normal[node]] = Mode.NORMAL
        return made

    def _finish_graph(self, graph_module: GraphModule) -> None:
        self._note_modes()
        if self._unclean_on and not self._always_autocasts(graph_module):
            self.call_operators("receives results of a self-cleaning region")
        if (self._grad_modes or self._made_normal) and (self._output.export or not self._is_eager):
            self._plan = self._make_plan(graph_module)
            self._replace_blocks(graph_module)

    def _always_autocasts(self, graph_module: GraphModule) -> bool:
        enter_region = torch.amp._enter_autocast  # type: ignore[attr-defined]
        states = [node.args[2] for node in graph_module.graph.nodes if node.target is enter_region]
        return all(states) and all(map(torch.is_autocast_enabled, self._unclean_on))

    def _make_plan(self, graph_module: GraphModule) -> _Plan:
        made = self._storages()
        (results,) = graph_module.graph.output_node().args
        modes = [made.get(storage_of(r.meta["example_value"])[0]) if _is_tensor(r) else None for r in results]  # type: ignore[union-attr]
        called = {self._modes.get(node) for node in graph_module.graph.nodes if self._is_operator(node)}
        is_only_one = len(called) == 1 and called >= {mode for mode in modes if mode is not None}
        return _Plan(modes, called.pop() if is_only_one else None, self._is_traced)

    def _is_operator(self, node: Node) -> bool:
        return (
            node.op in ("call_function", "call_method", "call_module")
            and node not in self._grad_modes
            and node not in self._made_normal
            and node.target is not torch._C._set_grad_enabled
        )

    def _replace_blocks(self, graph_module: GraphModule) -> None:
        graph = graph_module.graph
        for node, is_enabled in reversed(self._grad_modes.items()):
            with graph.inserting_before(node):
                graph.call_function(torch._C._set_grad_enabled, (is_enabled,))
            graph.erase_node(node)
        for node in self._made_normal:
            graph.erase_node(node)
        graph_module.recompile()

    def _calling(self, compiler: Any) -> Any:
        @functools.wraps(compiler)
        def compile_graph(graph_module: GraphModule, inputs: Any, **options: Any) -> Compiled:
            if self._why_not_compiled:
                _warn_once(self._output.root_tx.f_code, self._why_not_compiled)
                return _restoring_state(graph_module.forward)
            compiled: Compiled = _restoring_state(compiler(graph_module, inputs, **options))
            if self._plan is None or self._output.export:
                return compiled
            bypass_package(self._output)
            return self._plan.finishing(compiled)

        return compile_graph


class _Plan:
    """How to handle the results of compiled code.

    Attributes:
        modes: For each result, the mode in which its storage was made; None for inputs and other objects.
        only: The mode of all operators, if there is only one and no tensor was made normal later.
        is_traced: Whether origins are traced in a block.
    """

    def __init__(self, modes: list[Mode | None], only: Mode | None, is_traced: bool) -> None:
        self.modes = modes
        self.only = only
        self.is_traced = is_traced

    def finishing(self, compiled: Compiled) -> Compiled:
        """Return a function that calls `compiled` and converts its results."""

        def run(*args: Any) -> Any:
            is_inference = torch.is_inference_mode_enabled()
            wanted = [mode is Mode.INFERENCE or (mode is Mode.AROUND and is_inference) for mode in self.modes]
            if self.only is Mode.INFERENCE:
                with _C.InferenceBlock(trace=self.is_traced):
                    return self._finish(compiled(*args), wanted, args)
            if self.only is Mode.AROUND or not (is_inference or any(wanted)):
                return compiled(*args)
            with _C.NormalTensorsBlock() if is_inference else nullcontext():
                return self._finish(compiled(*args), wanted, args)

        return run

    def _finish(self, results: Any, wanted: list[bool], args: Any) -> Any:
        may_be_saved = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        is_traced = self.is_traced or are_all_blocks_traced()
        finished = list(results)
        with _C.InferenceBlock(trace=self.is_traced):
            for index, is_wanted in enumerate(wanted):
                result = finished[index]
                if is_wanted and not (result.is_inference() and (not is_traced or origin(result) is not None)):
                    finished[index] = _inference_tensor(result, is_copied=may_be_saved and not result.is_inference())
        return tuple(finished)


def _inference_tensor(tensor: torch.Tensor, is_copied: bool) -> torch.Tensor:
    """Return an inference tensor with the values of `tensor`. Must be called in inference mode."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if is_copied or not is_plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        return tensor.clone()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def bypass_package(output: Any) -> None:
    """Keep PyTorch from storing the code for other processes, because the conversion of the results would be lost."""
    output.bypass_package("torchext converts the results of the code to match eager code")


_has_warned = False


def _warn_once(code: CodeType, reason: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn_explicit(
            f"torch.compile: `{code.co_name}` {reason}, which backends do not support, so its operators are called "
            "as in eager code. To compile it, use amp.autocast() instead. Further functions are not reported.",
            TorchextWarning,
            code.co_filename,
            code.co_firstlineno,
        )


def results_of(output: Any) -> Results:
    """Return the results of the graph that Dynamo is building, created on first use."""
    found: Results = vars(output).get("_torchext_results") or Results(output)
    output._torchext_results = found
    return found


def _calls_operators(compiler: Any) -> bool:
    """Return true for the backend "eager"."""
    from torch._dynamo.backends.debugging import eager  # imported late: Inductor may be about to import Dynamo

    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return getattr(compiler, "compiler_fn", compiler) is eager  # `torch.compile()` wraps named backends


def _is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


# ---- The common base of our variables


Builder = Any
Translator = Any


class FunctionOfOurs(VariableTracker):
    """A C function. `trace` implements its effect on variables."""

    def __init__(self, trace: Callable[..., VariableTracker], **options: Any) -> None:
        super().__init__(**options)
        self.trace = trace

    def call_function(
        self, tx: Translator, args: Iterable[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        """Trace a call."""
        return self.trace(tx, *args, **kwargs)

    @classmethod
    def wrap(cls, trace: Callable[..., VariableTracker]) -> Callable[[Builder, Any], VariableTracker]:
        """Return the entry for a function in Dynamo's table of objects."""

        def build(builder: Builder, value: Any) -> VariableTracker:
            builder.install_guards(GuardBuilder.ID_MATCH)
            return cls(trace, source=builder.source)

        return build


class GuardClass(UserDefinedClassVariable):
    """A class of guards. Calling it makes a guard or decorates the given function."""

    def call_function(self, tx: Translator, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        """Trace the construction of a guard."""
        if args and is_function(args[0]):
            guard = self.make(tx, (), kwargs)
            return guard.call_function(tx, list(args[:1]), {})
        return self.make(tx, args, kwargs)

    def make(self, tx: Translator, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        """Construct the guard, so that it checks its arguments, and return its variable."""
        name = self.value.__name__
        given = constants(args, kwargs)
        if given is None:
            break_graph(
                f"{name}() with an argument that is not a constant",
                "Its arguments must be constants while Dynamo traces.",
            )
        try:
            guard = self.value(*given[0], **given[1])
        except (TypeError, ValueError) as error:
            break_graph(f"{name}() with invalid arguments", str(error))
        return self.variable(guard)

    def variable(self, guard: Any) -> VariableTracker:
        """Return the variable for a guard that the traced function has made."""
        raise NotImplementedError


def break_graph(what: str, why: str) -> NoReturn:
    """End the graph; an error with `fullgraph=True`. The messages name the construct, and the reason."""
    unimplemented(gb_type=f"torchext: {what}", context="", explanation=why, hints=[])


def constants(args: Any, kwargs: dict[str, VariableTracker]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the values of arguments, or None if one is not constant while Dynamo traces."""
    if not all(arg.is_python_constant() for arg in (*args, *kwargs.values())):
        return None
    return [arg.as_python_constant() for arg in args], {n: arg.as_python_constant() for n, arg in kwargs.items()}


def is_function(variable: VariableTracker) -> bool:
    """Return true if `variable` represents a function of the program."""
    return isinstance(variable, BaseUserFunctionVariable)


def inline(tx: Translator, function: Callable[..., Any], args: Any, kwargs: Any) -> VariableTracker:
    """Trace into a call of one of our functions."""
    result: VariableTracker = tx.inline_user_function_return(VariableTracker.build(tx, function), args, kwargs)
    return result


def guard_class(builder: Builder) -> None:
    """Use the traced code only for exactly this class."""
    builder.install_guards(GuardBuilder.CLASS_MATCH)


def guard_attributes(builder: Builder, names: Iterable[str]) -> None:
    """Use the traced code only for objects of the same type with equal attributes.

    Two equal regions therefore share it, unlike two of `torch.autocast` before 2.15.
    """
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    for name in names:
        install_guard(AttrSource(builder.source, name).make_guard(GuardBuilder.EQUALS_MATCH))


# ---- Functions that break the graph


# Their effects cannot be part of a graph: they mark tensors, or query PyTorch's dispatcher.
NOT_TRACED: list[Any] = [
    amp.policy,
    amp.register_policy,
    amp.to_normal,
    amp.to_amp,
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
