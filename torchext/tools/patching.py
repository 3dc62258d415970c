"""What torchext replaces in PyTorch: how it is done. When it is, and the list of it: `leases`.

A function that is replaced stays the object that it is: for whoever imported it by name before, for tables by function
as those of `torch.overrides`, TorchScript, Dynamo and subclasses with a `__torch_function__`, and for pickle, `help()`
and `inspect.signature()`. Only what it calls is exchanged:

- A function of Python gets other code with the same parameters. Where Dynamo traces, which knows neither fakes nor
  marks of ours, and for calls that it is not about, that calls the original.
- A method, a property, a constructor or a function of C gets another definition: NOTE [Replaced C functions] in
  csrc/python/patching.cpp.
- Of anything else, as a slot of a type or a value that nobody calls, the attribute itself is replaced.
"""

from __future__ import annotations

import enum
import inspect
import traceback
from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import getattr_static
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
)
from typing import Any, NamedTuple

import torch.compiler

from .. import _C
from .frames import skip_frames

__all__ = ["Concerns", "Make", "Patch", "Steps", "Thing", "patching_lock"]

Function = Callable[..., Any]
Make = Callable[[Any], Any]
"""Is given what to call for all that is not ours, and makes the replacement. That is called as the original was, except
that a function of Python hands on by position what can be given so, with defaults filled in. Of a value it makes a
value."""


class Concerns(enum.IntFlag):
    """Which calls go to the replacement; others go to the original, without Python if that is a function of C."""

    FAKES = _C.CONCERNS_FAKES
    """Those that have a fake tensor, the storage of one or the memo of `fake_like()` among their arguments."""
    MARKS = _C.CONCERNS_MARKS
    """Those that have a marked tensor among their arguments: NOTE [Marked tensors], csrc/marks/tensor_marks.h."""
    ALL = _C.CONCERNS_ALL


class Patch:
    """Something of PyTorch's that is replaced while it is installed.

    Attributes:
        owner: The module or the class that has it.
        name: Its name there.
        reason: What PyTorch does, for which it is replaced.
        lease: What is held by whoever needs it.
        releases: The releases of PyTorch that need it.
        thing: What is replaced, for this reason and for others.
        function: What is replaced, which goes on being the object that it is; None where it is another one.
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        make: Make,
        reason: str,
        *,
        concerns: Concerns = Concerns.ALL,
        lease: _C.Lease,
        is_traced: bool = False,
        releases: str = "all",
    ) -> None:
        self.owner = owner
        self.name = name
        self.reason = reason
        self.releases = releases
        self.make = make
        self.concerns = concerns
        self.lease = lease
        self.is_traced = is_traced
        self.thing = _thing_of(owner, name)
        self.thing.declared.append(self)
        self.function = self.thing.function

    @property
    def is_installed(self) -> bool:
        """Whether it is replaced now."""
        return self.lease.is_active()

    @property
    def target(self) -> str:
        """What is replaced, as it is written in a program."""
        return f"{_full_name(self.owner)}.{self.name}"

    def __repr__(self) -> str:
        return f"<Patch of {self.target}: {self.reason}>"


def _full_name(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


class _Lock:
    """A lock that a thread may take again.

    The core may ask the main thread for something at any time, also while that imports what another thread waits for
    with the lock held (`Py_AddPendingCall`). So it is not waited for there; whoever has the lock does it afterwards.
    """

    def __init__(self) -> None:
        self._lock = _C.Lock("patches")  # of the core, which orders it among its own and takes all of them for a fork
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self._run_waiting()

    def run_soon(self, function: Callable[[], None]) -> None:
        """Calls `function` with the lock, now or when whoever has it leaves it."""
        self._waiting.append(function)
        self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                function = self._waiting.pop() if self._waiting else None
                if function is not None:
                    function()
            except Exception:
                traceback.print_exc()  # none of the caller's business
            finally:
                self._lock.release()


patching_lock = _Lock()


class _Replacement(NamedTuple):
    function: Function
    concerns: int
    is_traced: bool


class Steps:
    """Exchanges that are done together, because there are many each time.

    Attributes:
        codes: Functions of Python, the code that each has, unless somebody else has changed it, and what it is given.
        functions: Functions of C, what is to be called in their places, and about which calls; None for the original.
        others: What else is to be done.
    """

    def __init__(self) -> None:
        self.codes: list[tuple[FunctionType, CodeType, CodeType]] = []
        self.functions: list[tuple[object, Function | None, int]] = []
        self.others: list[Callable[[], None]] = []

    def take(self) -> None:
        """Does all of it. What Python calls comes before what it is called by."""
        for step in self.others:
            step()
        _C.replace_functions(self.functions)
        _C.exchange_codes(self.codes)


class Thing:
    """What can be replaced.

    Attributes:
        function: The object that stays; None if another one takes its place.
        original: Calls what was there before.
        declared: What it may be replaced by.
    """

    function: Any
    original: Function

    def __init__(self) -> None:
        self.declared: list[Patch] = []
        self._made: dict[tuple[Patch, ...], _Replacement] = {}

    def plan(self, patches: tuple[Patch, ...], steps: Steps) -> None:
        """Adds to `steps` what puts `patches`, and no others, in place, whatever is there."""
        self._exchange((self._made.get(patches) or self._make(patches)) if patches else None, steps)

    def _make(self, patches: tuple[Patch, ...]) -> _Replacement:
        function = self.original
        is_traced = any(patch.is_traced for patch in patches)
        concerns = 0
        for patch in patches:
            function = patch.make(function)
            concerns |= patch.concerns
            if isinstance(function, FunctionType) and not is_traced:
                skip_frames(function.__code__)
        self._made[patches] = _Replacement(function, concerns, is_traced)
        return self._made[patches]

    def _exchange(self, replacement: _Replacement | None, steps: Steps) -> None:
        """Adds to `steps` what lets `replacement` be called, or the original."""
        raise NotImplementedError


class _PythonFunction(Thing):
    def __init__(self, function: FunctionType) -> None:
        super().__init__()
        self.function = function
        self.original = _copy_of(function)
        self._code = function.__code__
        self._forwarding: dict[tuple[int, bool], CodeType] = {}  # takes long to make
        self._index = len(replacements)
        replacements.append(self.original)
        originals.append(self.original)

    def _exchange(self, replacement: _Replacement | None, steps: Steps) -> None:
        # Of the original after the end, too: for whoever is on the way to it, or has taken over the code.
        called = self.original if replacement is None else replacement.function
        steps.others.append(partial(replacements.__setitem__, self._index, called))
        code = self._code if replacement is None else self._code_for(replacement.concerns, replacement.is_traced)
        for before in (self._code, *self._forwarding.values()):
            if before is not code:
                steps.codes.append((self.function, before, code))

    def _code_for(self, concerns: int, is_traced: bool) -> CodeType:
        key = concerns, is_traced
        if key not in self._forwarding:
            self._forwarding[key] = _forwarding_code(self.function, self._code, self._index, concerns, is_traced)
        return self._forwarding[key]


class _CFunction(Thing):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function
        self._replaced = function
        self.original = _C.original_of(function)
        if isinstance(function, GetSetDescriptorType):
            self.original = self.original.__get__

    def _exchange(self, replacement: _Replacement | None, steps: Steps) -> None:
        called, concerns = (None, 0) if replacement is None else (replacement.function, replacement.concerns)
        steps.functions.append((self._replaced, called, concerns))


class _Constructor(_CFunction):
    def __init__(self, cls: type) -> None:
        super().__init__(cls)
        self.function = cls.__new__
        self._replaced = self.original.__self__  # type: ignore[attr-defined]  # the type that has the slot


class _Attribute(Thing):
    def __init__(self, owner: Any, name: str) -> None:
        super().__init__()
        self.function = None
        self._owner = owner
        self._name = name
        self._own = vars(owner).get(name)
        self.original = getattr(owner, name)
        self._called = self.original
        self._concerns = int(Concerns.ALL)
        self._ours = self._make_ours()

    def _exchange(self, replacement: _Replacement | None, steps: Steps) -> None:
        steps.others.append(self._restore if replacement is None else partial(self._replace, replacement))

    def _replace(self, replacement: _Replacement) -> None:
        self._called, self._concerns = replacement.function, replacement.concerns
        if vars(self._owner).get(self._name) is self._own:  # else it is somebody else's by now
            setattr(self._owner, self._name, self._ours)

    def _restore(self) -> None:
        self._called = self.original  # for whoever has taken ours over
        if getattr_static(self._owner, self._name) is not self._ours:
            return
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)

    def _make_ours(self) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            called = self._called if is_about(self._concerns, *args, *kwargs.values()) else self.original
            return called(*args, **kwargs)

        update_wrapper(function, self.original)
        # As pickle looks for it.
        if isinstance(self._owner, type):
            function.__module__ = self._owner.__module__
            function.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        return function


class _Value(Thing):
    """An attribute that nobody calls. What replaces it is made of it."""

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__()
        self.function = None
        self._owner = owner
        self._name = name
        self.original = self._value = getattr(owner, name)

    def _exchange(self, replacement: _Replacement | None, steps: Steps) -> None:
        value = self.original if replacement is None else replacement.function
        steps.others.append(partial(self._set, value))

    def _set(self, value: Any) -> None:
        if vars(self._owner).get(self._name) is self._value:  # else it is somebody else's by now
            setattr(self._owner, self._name, value)
            self._value = value


_things: dict[object, Thing] = {}

# By the index of a `_PythonFunction`. Read by the code that it is given, which outlives this module if that is imported
# again; so the lists are those of the first import.
replacements: list[Function] = vars(_C).setdefault("__replacements__", [])
originals: list[Function] = vars(_C).setdefault("__originals__", [])
is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_about = _C.is_about

# A name in the code that forwards calls, which no parameter has, and what leads from there to this module.
PACKAGE = "_torchext_package"
THIS_MODULE = f"{PACKAGE}.{__name__.partition('.')[2]}"

C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType)


def _thing_of(owner: Any, name: str) -> Thing:
    found = vars(owner).get(name)
    if found is None:
        found = inspect.getattr_static(owner, name, None)
    if found is None:  # a module that answers for another one, as `torch.backends.cudnn`
        found = getattr(owner, name)
    found = getattr(found, "__func__", found)  # of static methods, of class methods, and of those of pybind11
    is_constructor = name == "__new__" and isinstance(found, BuiltinFunctionType)
    is_kept = type(found) in (FunctionType, *C_FUNCTIONS) and not is_constructor
    key = ("function", id(found)) if is_kept else ("attribute", id(owner), name)  # both are held by the thing
    if key not in _things:
        if is_constructor:
            _things[key] = _Constructor(owner)
        elif not is_kept and not callable(found) and not hasattr(type(found), "__get__"):
            _things[key] = _Value(owner, name)
        elif not is_kept:
            _things[key] = _Attribute(owner, name)
        elif isinstance(found, FunctionType):
            _things[key] = _PythonFunction(found)
        else:
            _things[key] = _CFunction(found)
    return _things[key]


def _copy_of(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(copy, function)
    del vars(copy)["__wrapped__"]
    return copy


def _forwarding_code(
    function: FunctionType, original: CodeType, index: int, concerns: int, is_traced: bool
) -> CodeType:
    """Code that takes what `function` takes, and calls its replacement with it, or the original.

    The number of free variables of a function cannot change, so the code has those of the original.
    """
    parameters, arguments, values = _parameters_of(original)
    others = [
        *([] if is_traced else [f"{THIS_MODULE}.is_dynamo_compiling()"]),
        *([] if is_traced or concerns & Concerns.ALL else [f"not {THIS_MODULE}.is_about({int(concerns)}, {values})"]),
    ]
    result = "return (yield from {})" if inspect.isgeneratorfunction(function) else "return {}"
    lines = [
        "def make():",
        *(f"    {name} = None" for name in original.co_freevars),
        f"    def function({parameters}):",
        # Neither a global name of PyTorch's module nor a closure: those would be changes of their own. The import of a
        # package alone is a look into a dictionary; one from a module takes ten times as long, to find no `__path__`.
        f"        import {__name__.partition('.')[0]} as {PACKAGE}",
        *([f"        if {' or '.join(others)}:"] if others else []),
        *(["            " + result.format(f"{THIS_MODULE}.originals[{index}]({arguments})")] if others else []),
        "        " + result.format(f"{THIS_MODULE}.replacements[{index}]({arguments})"),
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


def _parameters_of(code: CodeType) -> tuple[str, str, str]:
    """The parameters of a function, the arguments that hand them on, and the values of all of them."""
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
    values = [*by_position, *args, *by_name, *(f"*{kwarg[2:]}.values()" for kwarg in kwargs)]
    return ", ".join(parameters), ", ".join(arguments), ", ".join(values)
