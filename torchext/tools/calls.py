"""Functions whose calls are run in a way of their own, in whatever pieces they run."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar, cast

from .frames import skip_frames

__all__ = ["Call", "Way", "begin_generator", "call_in_block", "call_in_way", "run_in_block"]

Function = TypeVar("Function", bound=Callable[..., Any])
AnyFunction = Callable[..., Any]
Guard = Callable[[], AbstractContextManager[object]]


def _as_it_is(value: Any) -> Any:
    return value


class Call:
    """What is to be done about one call of a function.

    Attributes:
        guard: Makes what the function, or a piece of it, is to run in.
        cast_in: Casts its arguments. Runs within the guard.
        cast_out: Casts what it returns or yields. Runs after it.
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


# Returns what is to be done about a call that begins now. May be called any number of times, on any thread.
Way = Callable[[], Call]


class Resumable(Protocol):
    """A generator, a coroutine, or what an asynchronous generator returns for one step."""

    def send(self, value: Any, /) -> Any: ...

    def throw(self, error: BaseException, /) -> Any: ...

    def close(self) -> None: ...


def call_in_way(way: Way, function: Function, plain: Callable[[Function], Function] | None = None) -> Function:
    """Returns a function of the same kind as `function`, each call of which runs as `way` tells.

    A generator, a coroutine and an asynchronous generator are inside the guard while they run, and not while they
    wait: whoever resumes them is in the state that it was in.

    Args:
        way: Returns what is to be done about a call, when it begins.
        function: Anything that can be called.
        plain: Does the same for functions that are neither generators nor coroutines, in less time.
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
    """Returns a function of the same kind as `function` that runs inside `block`, as `call_in_way()` does.

    Args:
        block: What can be entered any number of times, also while it is open.
        function: Anything that can be called.
    """
    return call_in_way(lambda: Call(lambda: block), function, functools.partial(run_in_block, block))


def run_in_block(block: AbstractContextManager[object], function: Function) -> Function:
    """Does what `call_in_block()` does with a plain function: `torch.compile` traces into this."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return cast("Function", run)


def _is_kind(check: Callable[[object], bool], function: AnyFunction) -> bool:
    """Returns true if `check` is true of the function, or of the `__call__` of its class."""
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
    """Makes the generator or coroutine, of which nothing runs yet."""
    with call.guard():
        args, kwargs = call.cast_in((args, kwargs))
        return function(*args, **kwargs)


def _steps(guard: Guard, inner: Resumable, cast_out: Callable[[Any], Any] = _as_it_is) -> Generator[Any, Any, Any]:
    """Does what `yield from inner` does, with the guard around each step, and hands out what `cast_out` makes of it."""
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
    """Returns whether that was the end, and what was yielded or returned.

    Dynamo loses its way where the end of a generator passes through a block, or a block is in a generator.
    """
    with guard():
        try:
            return False, step(given)
        except StopIteration as stop:
            return True, stop.value


def begin_generator() -> None:
    """Does nothing; Dynamo is told by it that a decorated generator begins."""


# Of a function that returns a generator Dynamo makes one that returns an iterator, which has no `send()`.
for _function in (_begin, _step):
    skip_frames(_function.__code__)

_awaitable_steps = types.coroutine(_steps)
