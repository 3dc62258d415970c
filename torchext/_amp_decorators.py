"""Decorators of what runs autocasting, or in one precision: functions, methods, modules and autograd functions."""

from __future__ import annotations

import inspect
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import nn

from . import _C
from ._amp_casts import to_float32, to_lower_precision

__all__ = ["Autocasting", "InFloat32", "InLowerPrecision", "Way", "decorate"]

T = TypeVar("T", bound=Callable[..., Any])
State = dict[str, tuple[bool, torch.dtype]]


class Way(ABC):
    """A way to run functions. One object serves any number of calls, on any threads."""

    @abstractmethod
    def call(self) -> Call:
        """What is to be done about one call, as the thread is now."""


class Call:
    """What is to be done about one call of a function.

    Attributes:
        guard: Makes what the function, or a piece of it, is to run in.
        cast_in: Casts its arguments. Runs within the guard.
        cast_out: Casts its results. Runs after it.
    """

    def __init__(
        self,
        guard: Callable[[], AbstractContextManager[object]] = nullcontext,
        cast_in: Callable[[Any], Any] | None = None,
        cast_out: Callable[[Any], Any] | None = None,
    ) -> None:
        self.guard = guard
        self.cast_in = cast_in or _as_it_is
        self.cast_out = cast_out or _as_it_is


def _as_it_is(value: Any) -> Any:
    return value


class Autocasting(Way):
    """Runs functions in `region`, and casts to float32 what they return to where operators do not autocast."""

    def __init__(self, region: _C.AutocastRegion) -> None:
        self.region = region

    def call(self) -> Call:
        if not self.region._arguments()[2]:
            return Call(self.enter)
        return Call(self.enter, cast_out=to_float32) if self.region._is_outermost() else Call()

    def enter(self) -> AbstractContextManager[object]:
        return self.region


class InFloat32(Way):
    """Runs functions without autocast on float32, and has them return float32."""

    def call(self) -> Call:
        return Call(_no_autocast, cast_in=to_float32, cast_out=to_float32)


class InLowerPrecision(Way):
    """Runs functions on the lower precision, where operators autocast."""

    def call(self) -> Call:
        return Call(cast_in=to_lower_precision)


def _no_autocast() -> ExitStack:
    """On no device."""
    stack = ExitStack()
    for device_type in {"cpu", _C.autocast_device_type_in_use()}:
        stack.enter_context(_C.AutocastRegion(device_type, enabled=False))
    return stack


def decorate(target: T, way: Way) -> T:
    """Returns what runs `target` in the given way.

    Args:
        target: A function, of any kind, or a class of modules or of autograd functions, or a module. Those three are
            changed, and returned.
        way: How to run it.

    Raises:
        TypeError: `target` is something else.
    """
    if isinstance(target, nn.Module):
        _decorate_module(target, way)
        return target
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        _decorate_autograd_function(target, way)
        return target
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.forward = decorate(target.forward, way)
        return target
    if isinstance(target, type) or not (callable(target) or isinstance(target, classmethod)):
        what = f"the class {target.__name__}" if isinstance(target, type) else f"a {type(target).__name__}"
        raise TypeError(
            "torchext.amp decorates functions, methods, modules, and classes that derive from torch.nn.Module or "
            f"torch.autograd.Function, but this is {what}."
        )
    return _decorate_function(target, way)


def _decorate_function(function: T, way: Way) -> T:
    """Returns a function of the same kind."""
    if isinstance(function, staticmethod | classmethod):
        return type(function)(decorate(function.__func__, way))
    if _is_kind(inspect.iscoroutinefunction, function):
        return _decorate_coroutine(function, way)  # type: ignore[return-value]
    if _is_kind(inspect.isgeneratorfunction, function):
        return _decorate_generator(function, way)  # type: ignore[return-value]
    if _is_kind(inspect.isasyncgenfunction, function):
        name = getattr(function, "__qualname__", None) or repr(function)
        raise TypeError(
            f"torchext.amp does not decorate asynchronous generators, such as {name}: decorate the functions that it "
            "calls."
        )

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = way.call()
        with call.guard():
            args, kwargs = call.cast_in((args, kwargs))
            result = function(*args, **kwargs)
        return call.cast_out(result)

    return wrapper  # type: ignore[return-value]


def _is_kind(check: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Is it so of the function, or of what its class calls, if it is an object that can be called?"""
    return check(function) or check(type(function).__call__)


def _decorate_generator(function: Callable[..., Any], way: Way) -> Callable[..., Any]:
    """What it yields is what it gives out, and what it returns too. The thread's state is its own between the two."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        call = way.call()
        with call.guard():
            args, kwargs = call.cast_in((args, kwargs))
            steps = function(*args, **kwargs)
        return call.cast_out((yield from _run_in_steps(steps, call.guard, call.cast_out)))

    return wrapper


def _decorate_coroutine(function: Callable[..., Any], way: Way) -> Callable[..., Any]:
    """Other coroutines run on the same thread while it waits, and are none of its business."""

    @types.coroutine
    def run(call: Call, args: Any, kwargs: Any) -> Generator[Any, Any, Any]:
        with call.guard():
            args, kwargs = call.cast_in((args, kwargs))
        return call.cast_out((yield from _run_in_steps(function(*args, **kwargs), call.guard, _as_it_is)))

    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        return await run(way.call(), args, kwargs)

    return wrapper


def _run_in_steps(
    steps: Any, guard: Callable[[], AbstractContextManager[object]], cast_out: Callable[[Any], Any]
) -> Generator[Any, Any, Any]:
    """Runs a generator or a coroutine with the guard around each of its steps."""
    step = partial(steps.send, None)
    while True:
        try:
            with guard():
                item = step()
        except StopIteration as end:
            return end.value
        try:
            step = partial(steps.send, (yield cast_out(item)))
        except GeneratorExit:
            with guard():
                steps.close()
            raise
        except BaseException as error:
            step = partial(steps.throw, error)


def _decorate_module(module: nn.Module, way: Way) -> None:
    """Gives `module` a class of its own, as `torch.nn.utils.parametrize` does.

    A `forward` in its `__dict__` would be bound to it for good: copies and the replicas of DataParallel, which take
    over the `__dict__`, would run it on the original.
    """
    if "forward" in vars(module):
        module.forward = decorate(module.forward, way)
    else:
        module.__class__ = _class_of_one(type(module), way)


def _class_of_one(base: type[nn.Module], way: Way) -> type[nn.Module]:
    def reduce(self: nn.Module, protocol: Any) -> Any:
        return _make_one, (base, way), self.__getstate__() if hasattr(self, "__getstate__") else vars(self)

    members = {
        "forward": decorate(base.forward, way),
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (base,), members)


def _make_one(base: type[nn.Module], way: Way) -> nn.Module:
    cls = _class_of_one(base, way)
    return cls.__new__(cls)


def _decorate_autograd_function(cls: type[torch.autograd.Function], way: Way) -> None:
    """Its backward runs as its forward did: autocasting to the same dtype or not, on arguments cast in the same way."""
    has_context = cls.setup_context is torch.autograd.Function.setup_context
    forward, setup_context = cls.forward, cls.setup_context
    # PyTorch refuses functions that have both.
    backward_name = "backward" if cls.vjp is torch.autograd.Function.vjp else "vjp"
    backward = getattr(cls, backward_name)

    @wraps(forward)
    def wrapped_forward(*args: Any, **kwargs: Any) -> Any:
        call = way.call()
        with call.guard():
            if has_context:
                args[0]._amp_state = _autocast_state()
            args, kwargs = call.cast_in((args, kwargs))
            result = forward(*args, **kwargs)
        return call.cast_out(result)

    @wraps(setup_context)
    def wrapped_setup_context(ctx: Any, inputs: Any, output: Any) -> Any:
        with way.call().guard():
            ctx._amp_state = _autocast_state()
        return setup_context(ctx, inputs, output)

    @wraps(backward)
    def wrapped_backward(ctx: Any, *grads: Any) -> Any:
        with _in_state(ctx._amp_state):
            return backward(ctx, *way.call().cast_in(grads))

    cls.forward = staticmethod(wrapped_forward)  # type: ignore[method-assign]
    setattr(cls, backward_name, staticmethod(wrapped_backward))
    if not has_context:
        cls.setup_context = staticmethod(wrapped_setup_context)  # type: ignore[method-assign]


def _autocast_state() -> State:
    """Whether operators autocast now, and to what."""
    device_types = {"cpu", _C.autocast_device_type_in_use()}
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types}


def _in_state(state: State) -> ExitStack:
    stack = ExitStack()
    for device_type, (is_enabled, dtype) in state.items():
        stack.enter_context(_C.AutocastRegion(device_type, dtype=dtype, enabled=is_enabled))
    return stack
