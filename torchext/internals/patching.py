"""Replaces functions and attributes of PyTorch. `leases` decides when, and lists the patches.

A replaced function keeps its identity. This matters for code that imported it by name, for tables keyed by function
such as those of `torch.overrides`, for TorchScript, Dynamo and subclasses with a `__torch_function__`, and for pickle,
`help()` and `inspect.signature()`. Only the implementation is exchanged:

- A Python function gets other code with the same parameters. That code calls the original for calls that the patch does
  not concern, and while Dynamo traces, because Dynamo does not support our fakes or marks.
- The getter of a property of Python is such a function.
- A method, a property of C, a constructor or a C function gets another definition: NOTE [Replaced C functions] in
  csrc/python/patching.cpp.
- For anything else, such as a slot of a type or a value that is not callable, the attribute itself is replaced.

Patches that only some releases of PyTorch need depend on `DIFFERENCES`.
"""

from __future__ import annotations

import builtins
import enum
import functools
import inspect
import platform
import traceback
from collections.abc import Callable
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
from ..errors import PatchError
from .calls import skip_frames

__all__ = [
    "DIFFERENCES",
    "TORCH_RELEASE",
    "Concerns",
    "Difference",
    "Function",
    "Make",
    "Patch",
    "Patchable",
    "Steps",
    "once",
    "patching_lock",
]

Function = Callable[..., Any]
Make = Callable[[Any], Any]
"""Receives the value of an attribute, and returns the value that replaces it."""


class Concerns(enum.IntFlag):
    """The calls that go to the replacement. Others go to the original, without Python code if that is a C function."""

    FAKES = _C.CONCERNS_FAKES
    """Calls with a fake tensor, its storage or the memo of `fake_like()` among the arguments."""
    MARKS = _C.CONCERNS_MARKS
    """Calls with a marked tensor among the arguments: NOTE [Marked tensors], csrc/extensions/marks/tensor_marks.h."""
    ALL = _C.CONCERNS_ALL


class Patch:
    """The replacement of an attribute in PyTorch while a lease is held.

    Attributes:
        owner: The module or the class with the attribute.
        name: The name of the attribute.
        make: Receives the original or an earlier replacement, and returns what replaces it.
        reason: The PyTorch behavior that needs the patch.
        lease: The lease that installs it.
        releases: The releases of PyTorch that need it.
        patchable: The target, which several patches may share.
        function: The replaced function object, which keeps its identity; None if the attribute is replaced.
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
        is_added: bool = False,
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
        self.patchable: Patchable = _patchable_of(owner, name, is_added)
        self.patchable.declared.append(self)
        self.function: Any = self.patchable.function

    @property
    def is_installed(self) -> bool:
        """Whether the patch is installed now."""
        return self.lease.is_active()

    @property
    def target(self) -> str:
        """The name of the replaced attribute, as a program writes it."""
        return f"{_full_name(self.owner)}.{self.name}"

    def __repr__(self) -> str:
        return f"<Patch of {self.target}: {self.reason}>"


def _full_name(owner: Any) -> str:
    return f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else str(owner.__name__)


class _Lock:
    """A reentrant lock.

    The core may send requests to the main thread at any time (`Py_AddPendingCall`), even during an import that another
    thread waits for while it holds the lock. Such requests therefore do not wait for the lock; its holder runs them
    afterwards.
    """

    def __init__(self) -> None:
        self._lock = _C.Lock("patches")  # the core's lock: it has a lock order and is held across fork
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        self._run_waiting()

    def run_soon(self, function: Callable[[], None]) -> None:
        """Call `function` with the lock: now, or when the holder releases it."""
        self._waiting.append(function)
        self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                function = self._waiting.pop(0) if self._waiting else None
                if function is not None:
                    function()
            except Exception:
                traceback.print_exc()  # must not reach the caller
            finally:
                self._lock.release()


patching_lock: _Lock = _Lock()


class Steps(NamedTuple):
    """Replacements that are done in one batch, because there are many each time.

    A step on an attribute or on code changes nothing if the present value is not the expected one: other code has
    replaced it then.
    """

    attributes: list[tuple[object, str, object, object]]
    """Modules or classes, names, the expected values, and the new values; `...` for a missing attribute."""
    functions: list[tuple[object, Function | None, int]]
    """C functions, their replacements (None for the original), and the calls that these concern."""
    codes: list[tuple[FunctionType, CodeType, CodeType]]
    """Python functions, the expected code, and the new code."""


class Patchable:
    """A function or an attribute that can be replaced.

    Attributes:
        function: The object that keeps its identity; None if the attribute is replaced.
        original: Calls the original.
        declared: The patches of it.
    """

    function: Any
    original: Function

    def __init__(self, own: Any) -> None:
        self.declared: list[Patch] = []
        self._own = own  # the part that is exchanged
        self._made: dict[tuple[Patch, ...], Any] = {}  # what it is exchanged for; slow to make

    def plan(self, patches: tuple[Patch, ...], steps: Steps) -> None:
        """Add steps that install exactly `patches`, regardless of the installed ones."""
        if patches and patches not in self._made:
            function = self.original
            is_traced = any(patch.is_traced for patch in patches)
            concerns = 0
            for patch in patches:
                function = patch.make(function)
                concerns |= patch.concerns
                code = getattr(_innermost(function), "__code__", None)
                if code is not None and not is_traced:
                    skip_frames(code)
            self._made[patches] = self._make(patches, function, concerns, is_traced)
        self._exchange(self._made[patches] if patches else self._own, steps)

    def _make(self, patches: tuple[Patch, ...], function: Function, concerns: int, is_traced: bool) -> Any:
        """Return what `_own` is exchanged for, so that calls go to `function`."""
        raise NotImplementedError

    def _exchange(self, wanted: Any, steps: Steps) -> None:
        """Add steps that put `wanted` in place of `_own`, or of anything made before."""
        raise NotImplementedError

    def _others(self, wanted: Any) -> list[Any]:
        return [other for other in (self._own, *self._made.values()) if other is not wanted]


def _innermost(function: Any) -> Any:
    """Return the function of a `functools.partial`, or the function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


class _PythonFunction(Patchable):
    def __init__(self, function: FunctionType) -> None:
        super().__init__(function.__code__)
        self.function = function
        self.original = _copy_of(function)

    def _make(self, patches: tuple[Patch, ...], function: Function, concerns: int, is_traced: bool) -> CodeType:
        replacements.append(function)
        originals.append(self.original)
        return _forwarding_code(self.function, self._own, len(originals) - 1, concerns, is_traced)

    def _exchange(self, wanted: CodeType, steps: Steps) -> None:
        steps.codes.extend((self.function, other, wanted) for other in self._others(wanted))


@functools.cache
def _check_interpreter() -> None:
    """Raise PatchError if this interpreter calls a C function past the parts of it that are exchanged.

    From 3.11, CPython specializes calls that run often.
    """

    def call_often() -> object:
        for _ in range(100):
            result = _C.identity("original")
        return result

    found = []
    for replacement in (None, lambda _value: "replacement", None):
        _C.exchange(([], [(_C.identity, replacement, int(Concerns.ALL))], []))
        found.append(call_often())
    if found != ["original", "replacement", "original"]:
        raise PatchError(
            f"torchext cannot replace C functions in Python {platform.python_version()}. Use a version of Python that "
            "this torchext supports, or a newer torchext."
        )


class _CFunction(Patchable):
    def __init__(self, function: object) -> None:
        super().__init__((None, 0))
        self.function = function
        self._replaced = function
        self.original = _C.original_of(function)
        if isinstance(function, GetSetDescriptorType):
            self.original = self.original.__get__

    def _make(self, patches: tuple[Patch, ...], function: Function, concerns: int, is_traced: bool) -> Any:
        _check_interpreter()
        return function, concerns

    def _exchange(self, wanted: tuple[Function | None, int], steps: Steps) -> None:
        steps.functions.append((self._replaced, *wanted))


class _Constructor(_CFunction):
    def __init__(self, cls: type) -> None:
        super().__init__(cls)
        self.function = cls.__new__
        self._replaced = self.original.__self__  # type: ignore[attr-defined]  # the type that has the slot


class _Value(Patchable):
    """An attribute that is replaced itself, because it is not callable, is a builtin, or is missing in some builds."""

    def __init__(self, owner: Any, name: str) -> None:
        super().__init__(vars(owner).get(name, ...))
        self.function = None
        self._owner = owner
        self._name = name
        if not hasattr(owner, name) and not hasattr(builtins, name):
            self.original = _raising_attribute_error(owner, name)
        else:
            self.original = getattr(owner, name) if hasattr(owner, name) else getattr(builtins, name)

    def _make(self, patches: tuple[Patch, ...], function: Function, concerns: int, is_traced: bool) -> Any:
        return function

    def _exchange(self, wanted: Any, steps: Steps) -> None:
        steps.attributes.extend((self._owner, self._name, other, wanted) for other in self._others(wanted))


def _raising_attribute_error(owner: Any, name: str) -> Function:
    def original(*args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"module {owner.__name__!r} has no attribute {name!r}", name=name, obj=owner)

    return original


class _Attribute(_Value):
    def _make(self, patches: tuple[Patch, ...], function: Function, concerns: int, is_traced: bool) -> Any:
        def ours(*args: Any, **kwargs: Any) -> Any:
            # Other code may still hold this function after the patches are removed.
            is_wanted = any(patch.is_installed for patch in patches) and is_about(concerns, *args, *kwargs.values())
            return (function if is_wanted else self.original)(*args, **kwargs)

        functools.update_wrapper(ours, self.original)
        # Needed by pickle.
        if isinstance(self._owner, type):
            ours.__module__ = self._owner.__module__
            ours.__qualname__ = f"{self._owner.__qualname__}.{self._name}"
        return ours


_patchables: dict[object, Patchable] = {}

# The code that forwards calls reads these lists, by the index in it. It outlives this module if this is imported again,
# so the lists of the first import are kept.
replacements: list[Function] = vars(_C).setdefault("__replacements__", [])
originals: list[Function] = vars(_C).setdefault("__originals__", [])
is_dynamo_compiling: Callable[[], bool] = torch.compiler.is_dynamo_compiling
is_about: Callable[..., bool] = _C.is_about

# A name in the forwarding code that no parameter has, and the path from there to this module.
PACKAGE = "_torchext_package"
THIS_MODULE = f"{PACKAGE}.{__name__.partition('.')[2]}"

C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType, ClassMethodDescriptorType, GetSetDescriptorType)


def _patchable_of(owner: Any, name: str, is_added: bool) -> Patchable:
    found = vars(owner).get(name)
    if is_added:  # callers look it up at each call, because another build does not have it
        added = ("attribute", id(owner), name)
        if added not in _patchables:
            _patchables[added] = _Value(owner, name)
        return _patchables[added]
    if found is None:
        found = inspect.getattr_static(owner, name, None)
    if found is None:  # a module that forwards to another one, such as `torch.backends.cudnn`
        found = getattr(owner, name, None)
    if found is None and not hasattr(owner, name) and not hasattr(builtins, name):  # that functions of a module find
        raise PatchError(
            f"torchext replaces {_full_name(owner)}.{name}, which PyTorch {torch.__version__} does not have. Install a "
            "release of PyTorch that torchext supports."
        )
    found = getattr(found, "__func__", found)  # for static methods, class methods, and those of pybind11
    found = found.fget if isinstance(found, property) else found
    is_constructor = name == "__new__" and isinstance(found, BuiltinFunctionType)
    is_kept = type(found) in (FunctionType, *C_FUNCTIONS) and not is_constructor
    key = ("function", id(found)) if is_kept else ("attribute", id(owner), name)  # the patchable keeps both ids valid
    if key not in _patchables:
        if is_constructor:
            _patchables[key] = _Constructor(owner)
        elif not is_kept and not callable(found) and not hasattr(type(found), "__get__"):
            _patchables[key] = _Value(owner, name)
        elif not is_kept:
            _patchables[key] = _Attribute(owner, name)
        elif isinstance(found, FunctionType):
            _patchables[key] = _PythonFunction(found)
        else:
            _patchables[key] = _CFunction(found)
    return _patchables[key]


def _copy_of(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del vars(copy)["__wrapped__"]
    return copy


def _forwarding_code(
    function: FunctionType, original: CodeType, index: int, concerns: int, is_traced: bool
) -> CodeType:
    """Return code with the parameters of `function` that calls its replacement or the original.

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
        # A global name in PyTorch's module or a closure would be visible changes. Importing a package is only a
        # dictionary lookup; importing from a module takes ten times as long, because it looks for a `__path__`.
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
    """Return the parameters of a function, the arguments that forward them, and the values of all of them."""
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


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `function` the first time only. Other threads wait until that call is done.

    If it fails, the next call tries again. Recursive calls do nothing.
    """
    is_done = is_running = False

    @functools.wraps(function)
    def run() -> None:
        nonlocal is_done, is_running
        if is_done:
            return
        with patching_lock:  # most of these functions declare patches
            if is_done or is_running:
                return
            is_running = True
            try:
                function()
                is_done = True
            finally:
                is_running = False

    return run


# ---- The installed release of PyTorch, for which torchext was built, and how it differs from others


TORCH_RELEASE: tuple[int, ...] = tuple(int(part) for part in _C.built_for_torch.split(".")[:2])
"""The major and the minor version. Nightly builds and release candidates count as their release."""


class Difference(NamedTuple):
    """A behavior of PyTorch in a range of releases, both ends included. Release 2.11 is written 211."""

    since: int
    until: int
    what: str

    @property
    def applies(self) -> bool:
        """Return true if it applies to the installed release."""
        return self.since <= 100 * TORCH_RELEASE[0] + TORCH_RELEASE[1] <= self.until

    @property
    def releases(self) -> str:
        """Return the range of releases in words."""
        since, until = (f"{release // 100}.{release % 100}" for release in self[:2])
        return f"since {since}" if until == "99.0" else f"{since} to {until}"


DIFFERENCES = {name: Difference(*row) for name, row in _C.differences_between_releases.items()}
"""All differences by name: the table in csrc/core/torch_internals/torch_compat.h."""
