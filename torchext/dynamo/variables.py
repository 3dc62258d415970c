"""Common base of our variables, and functions that break the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from .. import amp, inference
from ..internals.calls import begin_generator, skip_frames
from ..internals.torch_release import DIFFERENCES

__all__ = [
    "BY_OBJECT",
    "FunctionOfOurs",
    "GuardClass",
    "break_graph",
    "constants",
    "disallow_in_graph",
    "guard_attributes",
    "guard_class",
    "inline",
    "is_function",
]

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
