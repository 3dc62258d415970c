"""Runs calls of functions under a guard, including generators and coroutines, which run piecewise."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any, Protocol, TypeVar, cast

import torch

__all__ = [
    "Block",
    "Call",
    "Way",
    "begin_generator",
    "call_in_block",
    "call_in_way",
    "run_in_block",
    "skip_frames",
]


# ---- Frames that Dynamo does not compile


def skip_frames(code: CodeType, *, with_callees: bool = False) -> None:
    """Keep Dynamo from compiling calls of `code` that follow a graph break. Dynamo still traces into it from outside.

    Dynamo compiles each function that is called after a graph break, except those in PyTorch's files.

    Args:
        code: The code of the function.
        with_callees: Whether to exclude the functions that it calls as well.
    """
    frames: Any = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
    frames.set_code_exec_strategy(code, strategy)


# ---- Calls under a guard


Function = TypeVar("Function", bound=Callable[..., Any])
AnyFunction = Callable[..., Any]
Guard = Callable[[], AbstractContextManager[object]]


def _as_it_is(value: Any) -> Any:
    return value


class Call:
    """How to run one call of a function.

    Attributes:
        guard: Returns the context manager in which the function, or a step of it, runs.
        cast_in: Casts the arguments. Runs within the guard.
        cast_out: Casts what the function returns or yields. Runs after the guard.
    """

    def __init__(
        self,
        guard: Guard = nullcontext,
        cast_in: Callable[[Any], Any] = _as_it_is,
        cast_out: Callable[[Any], Any] = _as_it_is,
    ) -> None:
        self.guard = guard
        self.cast_in = cast_in
        self.cast_out = cast_out


# Returns how to run a call that begins now. It may be called any number of times, on any thread.
Way = Callable[[], Call]


class Resumable(Protocol):
    """A generator, a coroutine, or the awaitable for one step of an asynchronous generator."""

    def send(self, value: Any, /) -> Any: ...

    def throw(self, error: BaseException, /) -> Any: ...

    def close(self) -> None: ...


def call_in_way(way: Way, function: Function, plain: Callable[[Function], Function] | None = None) -> Function:
    """Return a function of the same kind as `function` that runs each call as `way` specifies.

    Generators, coroutines and asynchronous generators are inside the guard while they run, and outside while they are
    suspended. The state of the code that resumes them does not change.

    Args:
        way: Returns how to run a call, when the call begins.
        function: Any callable.
        plain: A faster implementation for functions that are neither generators nor coroutines.
    """
    if _is_kind(inspect.isasyncgenfunction, function):
        wrapper = _asynchronous_generator(way, function)
    elif _is_kind(inspect.iscoroutinefunction, function):
        wrapper = _coroutine(way, function)
    elif _is_kind(inspect.isgeneratorfunction, function):
        wrapper = _generator(way, function)
    else:
        wrapper = _plain(way, function) if plain is None else plain(function)
    return cast("Function", functools.update_wrapper(wrapper, function))


def call_in_block(block: AbstractContextManager[object], function: Function) -> Function:
    """Return a function of the same kind as `function` that runs inside `block`, by the rules of `call_in_way()`.

    Args:
        block: A reusable and reentrant context manager.
        function: Any callable.
    """
    return call_in_way(lambda: Call(lambda: block), function, functools.partial(run_in_block, block))


def run_in_block(block: AbstractContextManager[object], function: Function) -> Function:
    """Implement `call_in_block()` for a plain function. `torch.compile` traces into this."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return cast("Function", run)


class Block:
    """A context manager that can be entered again after it was left, and a decorator of functions of all kinds.

    Args:
        name: The name of the function that returns the block, for errors.
        make: Returns the context manager for one entry, or for one step of a decorated function.
        is_resumable: Whether a function may leave the block while it is suspended. If not, the decorator refuses
            generators and coroutines.
    """

    def __init__(self, name: str, make: Callable[[], AbstractContextManager[Any]], *, is_resumable: bool) -> None:
        self._name = name
        self._make = make
        self._is_resumable = is_resumable
        self._entered: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self._entered is not None:
            raise RuntimeError(
                f"This block of {self._name}() is already open. Call {self._name}() again for a nested block, or for a "
                "block on another thread."
            )
        self._entered = block = self._make()
        try:
            block.__enter__()
        except BaseException:
            self._entered = None
            raise

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: types.TracebackType | None
    ) -> bool | None:
        block, self._entered = self._entered, None
        if block is None:
            raise RuntimeError(f"This block of {self._name}() is not open.")
        return block.__exit__(error_type, error, traceback)

    def __call__(self, function: Function) -> Function:
        """Decorate `function`."""
        if not callable(function):
            raise TypeError(f"@{self._name}() decorates functions, but this is a {type(function).__name__}.")
        if inspect.isclass(function):
            raise TypeError(
                f"@{self._name}() decorates functions, but `{function.__name__}` is a class. Construct it in `with "
                f"{self._name}():` instead."
            )
        if not self._is_resumable and _is_suspended(function):
            raise TypeError(
                f"@{self._name}() does not decorate generators and coroutines, because they run after the call "
                f"returned. Use `with {self._name}():` inside the function."
            )
        return call_in_way(lambda: Call(self._make), function)


def _is_suspended(function: AnyFunction) -> bool:
    kinds = (inspect.isasyncgenfunction, inspect.iscoroutinefunction, inspect.isgeneratorfunction)
    return any(_is_kind(kind, function) for kind in kinds)


def _is_kind(check: Callable[[object], bool], function: AnyFunction) -> bool:
    """Return true if `check` holds for the function, or for the `__call__` of its class."""
    return check(function) or check(type(function).__call__)


def _plain(way: Way, function: AnyFunction) -> AnyFunction:
    def run(*args: Any, **kwargs: Any) -> Any:
        call = way()
        with call.guard():
            args, kwargs = call.cast_in((args, kwargs))
            result = function(*args, **kwargs)
        return call.cast_out(result)

    return run


def _generator(way: Way, function: AnyFunction) -> AnyFunction:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        begin_generator()
        call = way()
        inner = _begin(call, function, args, kwargs)
        return call.cast_out((yield from _steps(call.guard, inner, call.cast_out)))

    return run


def _coroutine(way: Way, function: AnyFunction) -> AnyFunction:
    async def run(*args: Any, **kwargs: Any) -> Any:
        call = way()
        return call.cast_out(await _awaitable_steps(call.guard, _begin(call, function, args, kwargs)))

    return run


def _asynchronous_generator(way: Way, function: AnyFunction) -> AnyFunction:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        call = way()
        inner = _begin(call, function, args, kwargs)
        step: Callable[[Any], Any] = inner.asend
        given: Any = None
        while True:
            try:
                item = await _awaitable_steps(call.guard, step(given))
            except StopAsyncIteration:
                return
            try:
                given = yield call.cast_out(item)
            except GeneratorExit:
                await _awaitable_steps(call.guard, inner.aclose())
                raise
            except BaseException as error:
                step, given = inner.athrow, error
            else:
                step = inner.asend

    return run


def _begin(call: Call, function: AnyFunction, args: Any, kwargs: Any) -> Any:
    """Create the generator or coroutine without starting it."""
    with call.guard():
        args, kwargs = call.cast_in((args, kwargs))
        return function(*args, **kwargs)


def _steps(guard: Guard, inner: Resumable, cast_out: Callable[[Any], Any] = _as_it_is) -> Generator[Any, Any, Any]:
    """Implement `yield from inner` with the guard around each step, and yield the results of `cast_out`."""
    step: Callable[[Any], Any] = inner.send
    given: Any = None
    while True:
        has_ended, item = _step(guard, step, given)
        if has_ended:
            return item
        try:
            given = yield cast_out(item)
        except GeneratorExit:
            with guard():
                inner.close()
            raise
        except BaseException as error:
            step, given = inner.throw, error
        else:
            step = inner.send


def _step(guard: Guard, step: Callable[[Any], Any], given: Any) -> tuple[bool, Any]:
    """Run one step. Return whether the generator has ended, and the value that it has yielded or returned.

    Dynamo fails if the end of a generator passes through a block, or if a block is in a generator.
    """
    with guard():
        try:
            return False, step(given)
        except StopIteration as stop:
            return True, stop.value


def begin_generator() -> None:
    """Do nothing. The call marks the start of a decorated generator for Dynamo."""


# Dynamo turns a function that returns a generator into one that returns an iterator without `send()`.
for _function in (_begin, _step):
    skip_frames(_function.__code__)

_awaitable_steps = types.coroutine(_steps)
