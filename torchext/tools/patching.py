"""What torchext replaces in PyTorch: how it is done, and the list of it.

A function that is replaced stays the object that it is: for whoever imported it by name before, for tables by function
as those of `torch.overrides`, TorchScript, Dynamo and subclasses with a `__torch_function__`, and for pickle, `help()`
and `inspect.signature()`. Only what it calls is exchanged:

- A function of Python gets other code with the same parameters. Where Dynamo traces, which knows neither fakes nor
  marks of ours, that calls the original.
- A method, a property or a function of C gets another definition: NOTE [Replaced C functions] in
  csrc/python/patching.cpp.
- Of anything else, as a `__new__` or a slot of a type, the attribute itself is replaced.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from functools import update_wrapper
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
)
from typing import Any, Protocol

import torch.compiler

from .. import _C

__all__ = ["Patch", "patch", "patches"]

Function = Callable[..., Any]
Make = Callable[[Function], Function]
"""Is given what to call for all that is not ours, and makes the replacement. That is called as the original was, except
that a function of Python hands on by position what can be given so, with defaults filled in."""


class Patch:
    """Something of PyTorch's that is replaced, until it is given back.

    Attributes:
        owner: The module or the class that has it.
        name: Its name there.
        reason: What PyTorch does, for which it is replaced.
        function: What is replaced, which goes on being the object that it is; None where it is another one.
    """

    def __init__(self, owner: Any, name: str, make: Make, reason: str, target: _Target) -> None:
        self.owner = owner
        self.name = name
        self.reason = reason
        self.function = target.function
        self._make = make
        self._target = target

    def give_back(self) -> None:
        """Takes this replacement away; others of the same function stay."""
        with _lock:
            patches.remove(self)
            self._target.patches.remove(self)
            _install(self._target)

    def __repr__(self) -> str:
        return f"<Patch of {getattr(self.owner, '__qualname__', self.owner.__name__)}.{self.name}: {self.reason}>"


patches: list[Patch] = []
"""What is replaced now, in the order in which it was."""


def patch(owner: Any, name: str, make: Make, reason: str, *, is_traced: bool = False) -> Patch:
    """Replaces an attribute of a module or a class.

    Args:
        owner: The module or the class. A function that a class inherits is replaced for all who do.
        name: The name of the attribute.
        make: Is given what was there before, and returns what shall be called. What is replaced twice is given the
            replacement.
        reason: What PyTorch does, for which this is needed.
        is_traced: Whether Dynamo traces the replacement of a function of Python, and not the original.
    """
    with _lock:
        target = _target_of(owner, name)
        target.is_traced = target.is_traced or is_traced
        done = Patch(owner, name, make, reason, target)
        target.patches.append(done)
        try:
            _install(target)
        except BaseException:
            target.patches.remove(done)
            raise
        patches.append(done)
    return done


class _Target(Protocol):
    """What can be replaced."""

    function: Any
    original: Function
    is_traced: bool
    patches: list[Patch]

    def replace(self, replacement: Function | None) -> None:
        """Lets `replacement` be called, or the original if it is None."""


class _PythonFunction:
    def __init__(self, function: FunctionType) -> None:
        self.is_traced = False
        self.patches: list[Patch] = []
        self._forwarding: dict[bool, CodeType] = {}  # by `is_traced`; takes long to make
        self.function = function
        self._code = function.__code__
        self.original: Function = _copy_of(function)
        self._index = len(replacements)
        replacements.append(self.original)
        originals.append(self.original)

    def replace(self, replacement: Function | None) -> None:
        if replacement is None:
            self.function.__code__ = self._code
            return
        replacements[self._index] = replacement
        # Where the code finds this module. Others have it by the same name.
        self.function.__globals__[MODULE] = sys.modules[__name__]
        if self.is_traced not in self._forwarding:
            code = _forwarding_code(self.function, self._code, self._index, self.is_traced)
            self._forwarding[self.is_traced] = code
        self.function.__code__ = self._forwarding[self.is_traced]


class _CFunction:
    def __init__(self, function: object) -> None:
        self.is_traced = False
        self.patches: list[Patch] = []
        self.function = function
        self.original: Function = _C.original_of(function)
        if isinstance(function, GetSetDescriptorType):
            self.original = self.original.__get__

    def replace(self, replacement: Function | None) -> None:
        _C.replace_function(self.function, replacement)


class _Attribute:
    def __init__(self, owner: Any, name: str) -> None:
        self.is_traced = True
        self.patches: list[Patch] = []
        self.function = None
        self._owner = owner
        self._name = name
        self._own = vars(owner).get(name)
        self.original: Function = getattr(owner, name)

    def replace(self, replacement: Function | None) -> None:
        if replacement is not None:
            update_wrapper(replacement, self.original)
            # As pickle looks for it.
            replacement.__module__ = self._owner.__module__
            replacement.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
            setattr(self._owner, self._name, replacement)
        elif self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


_lock = threading.RLock()
_targets: dict[object, _Target] = {}

# By the index of a `_PythonFunction`. Read by the code that it is given, which outlives this module if that is imported
# again; so the lists are those of the first import.
replacements: list[Function] = vars(_C).setdefault("__replacements__", [])
originals: list[Function] = vars(_C).setdefault("__originals__", [])
is_dynamo_compiling = torch.compiler.is_dynamo_compiling

MODULE = "__torchext_patching__"

C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType)


def _target_of(owner: Any, name: str) -> _Target:
    found = vars(owner).get(name)
    if found is None:
        found = inspect.getattr_static(owner, name, None)
    if found is None:  # a module that answers for another one, as `torch.backends.cudnn`
        found = getattr(owner, name)
    found = getattr(found, "__func__", found)  # of static methods, of class methods, and of those of pybind11
    is_kept = type(found) in (FunctionType, *C_FUNCTIONS) and name != "__new__"
    key = ("function", id(found)) if is_kept else ("attribute", id(owner), name)  # both are held by the target
    if key not in _targets:
        if not is_kept:
            _targets[key] = _Attribute(owner, name)
        elif isinstance(found, FunctionType):
            _targets[key] = _PythonFunction(found)
        else:
            _targets[key] = _CFunction(found)
    return _targets[key]


def _install(target: _Target) -> None:
    function: Function | None = None
    for made in target.patches:
        function = made._make(target.original if function is None else function)
        if isinstance(function, FunctionType) and not target.is_traced:
            _keep_from_dynamo(function.__code__)
    target.replace(function)


def _keep_from_dynamo(code: CodeType) -> None:
    """Dynamo compiles each function that a graph break leads to, but those in files of PyTorch's, as the originals."""
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    frames.set_code_exec_strategy(code, skip)


def _copy_of(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    del vars(copy)["__wrapped__"]
    return copy


def _forwarding_code(function: FunctionType, original: CodeType, index: int, is_traced: bool) -> CodeType:
    """Code that takes what `function` takes, and calls its replacement with it.

    The number of free variables of a function cannot change, so the code has those of the original.
    """
    parameters, arguments = _parameters_of(original)
    result = "return (yield from {})" if inspect.isgeneratorfunction(function) else "return {}"
    lines = [
        "def make():",
        *(f"    {name} = None" for name in original.co_freevars),
        f"    def function({parameters}):",
        *([] if is_traced else [f"        if {MODULE}.is_dynamo_compiling():"]),
        *([] if is_traced else ["            " + result.format(f"{MODULE}.originals[{index}]({arguments})")]),
        "        " + result.format(f"{MODULE}.replacements[{index}]({arguments})"),
        *(f"        {name}" for name in original.co_freevars),
        "    return function",
    ]
    names: dict[str, Any] = {}
    exec("\n".join(lines), names)
    code: CodeType = names["make"]().__code__
    given = {"co_name": original.co_name, "co_filename": original.co_filename}
    if hasattr(original, "co_qualname"):  # since Python 3.11
        given["co_qualname"] = original.co_qualname
    return code.replace(co_firstlineno=original.co_firstlineno, **given)  # type: ignore[arg-type]


def _parameters_of(code: CodeType) -> tuple[str, str]:
    """The parameters of a function, and the arguments that hand them on."""
    count, only_by_name = code.co_argcount, code.co_kwonlyargcount
    by_position = list(code.co_varnames[:count])
    by_name = list(code.co_varnames[count : count + only_by_name])
    others = list(code.co_varnames[count + only_by_name :])
    has_args, has_kwargs = (bool(code.co_flags & flag) for flag in (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS))
    args = [f"*{others.pop(0)}"] if has_args else []
    kwargs = [f"**{others.pop(0)}"] if has_kwargs else []
    slash = ["/"] if code.co_posonlyargcount else []
    star = ["*"] if by_name and not has_args else []
    only_by_position = by_position[: code.co_posonlyargcount]
    parameters = [*only_by_position, *slash, *by_position[code.co_posonlyargcount :], *args, *star, *by_name, *kwargs]
    arguments = [*by_position, *args, *(f"{name}={name}" for name in by_name), *kwargs]
    return ", ".join(parameters), ", ".join(arguments)
