"""What our variables have in common: Dynamo's stand-ins, while it traces, for the objects of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import BaseUserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

__all__ = [
    "FunctionOfOurs",
    "GuardClass",
    "break_graph",
    "constants",
    "guard_attributes",
    "guard_class",
    "inline",
    "is_function",
]

Builder = Any
Translator = Any


class FunctionOfOurs(VariableTracker):
    """A function written in C, of which `trace` tells what it does to variables."""

    def __init__(self, trace: Callable[..., VariableTracker], **options: Any) -> None:
        super().__init__(**options)
        self.trace = trace

    def call_function(
        self, tx: Translator, args: Iterable[VariableTracker], kwargs: dict[str, VariableTracker]
    ) -> VariableTracker:
        """Traces a call."""
        return self.trace(tx, *args, **kwargs)

    @classmethod
    def wrap(cls, trace: Callable[..., VariableTracker]) -> Callable[[Builder, Any], VariableTracker]:
        """Returns what the table of objects has to have for a function."""

        def build(builder: Builder, value: Any) -> VariableTracker:
            builder.install_guards(GuardBuilder.ID_MATCH)
            return cls(trace, source=builder.source)

        return build


class GuardClass(UserDefinedClassVariable):
    """A class whose instances are guards: calling it makes one, or decorates the function that it is given."""

    def call_function(self, tx: Translator, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        """Traces the making of a guard."""
        if args and is_function(args[0]):
            guard = self.make(tx, (), kwargs)
            return guard.call_function(tx, list(args[:1]), {})
        return self.make(tx, args, kwargs)

    def make(self, tx: Translator, args: Any, kwargs: dict[str, VariableTracker]) -> VariableTracker:
        """Makes the guard in earnest, so that it checks its arguments, and returns the variable for it."""
        name = self.value.__name__
        given = constants(args, kwargs)
        if given is None:
            break_graph(
                f"{name}() of what Dynamo does not know", "Its arguments must be constants while Dynamo traces."
            )
        try:
            guard = self.value(*given[0], **given[1])
        except (TypeError, ValueError) as error:
            break_graph(f"{name}() with arguments that it refuses", str(error))
        return self.variable(guard)

    def variable(self, guard: Any) -> VariableTracker:
        """Returns the variable for a guard that the traced function has made."""
        raise NotImplementedError


def break_graph(what: str, why: str) -> NoReturn:
    """Ends the graph; with `fullgraph=True` that is an error, which says what was met, and why it cannot be traced."""
    unimplemented(gb_type=f"torchext: {what}", context="", explanation=why, hints=[])


def constants(args: Any, kwargs: dict[str, VariableTracker]) -> tuple[list[Any], dict[str, Any]] | None:
    """Returns the values of arguments, or None if one of them is not known while Dynamo traces."""
    if not all(arg.is_python_constant() for arg in (*args, *kwargs.values())):
        return None
    return [arg.as_python_constant() for arg in args], {n: arg.as_python_constant() for n, arg in kwargs.items()}


def is_function(variable: VariableTracker) -> bool:
    """Returns true if `variable` is one for a function of the program's."""
    return isinstance(variable, BaseUserFunctionVariable)


def inline(tx: Translator, function: Callable[..., Any], args: Any, kwargs: Any) -> VariableTracker:
    """Traces into a call of a function of ours."""
    result: VariableTracker = tx.inline_user_function_return(VariableTracker.build(tx, function), args, kwargs)
    return result


def guard_class(builder: Builder) -> None:
    """Lets the traced code be used for this very class only."""
    builder.install_guards(GuardBuilder.CLASS_MATCH)


def guard_attributes(builder: Builder, names: Iterable[str]) -> None:
    """Lets the traced code be used for objects of the same type whose attributes are equal to these.

    Two regions that are alike therefore share it, unlike two of `torch.autocast` before 2.15.
    """
    builder.install_guards(GuardBuilder.TYPE_MATCH)
    for name in names:
        install_guard(AttrSource(builder.source, name).make_guard(GuardBuilder.EQUALS_MATCH))
