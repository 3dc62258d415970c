"""Functions whose every step runs inside of a block."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast

__all__ = ["in_block"]

Function = TypeVar("Function", bound=Callable[..., Any])
# Can be entered any number of times, also while it is open.
Block = AbstractContextManager[None]


class Resumable(Protocol):
    """A generator, a coroutine, or what an asynchronous generator returns for one step."""

    def send(self, value: Any, /) -> Any: ...

    def throw(self, error: BaseException, /) -> Any: ...

    def close(self) -> None: ...


def in_block(block: Block, function: Function) -> Function:
    """Returns `function` so that it runs inside of `block`, in whatever pieces it runs.

    A generator, a coroutine and an asynchronous generator are inside while they run, and not while they wait: whoever
    resumes them is in the state that it was in.
    """
    if inspect.isasyncgenfunction(function):
        wrapper: Callable[..., Any] = _asynchronous_generator(block, function)
    elif inspect.iscoroutinefunction(function):
        wrapper = _coroutine(block, function)
    elif inspect.isgeneratorfunction(function):
        wrapper = _generator(block, function)
    else:
        wrapper = _plain(block, function)
    return cast("Function", functools.update_wrapper(wrapper, function))


def _plain(block: Block, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with block:
            return function(*args, **kwargs)

    return run


def _generator(block: Block, function: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        return (yield from _steps(block, function(*args, **kwargs)))

    return run


def _coroutine(block: Block, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await _awaitable_steps(block, function(*args, **kwargs))

    return run


def _asynchronous_generator(block: Block, function: Callable[..., AsyncGenerator[Any, Any]]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)
        step: Callable[[Any], Any] = inner.asend
        given: Any = None
        while True:
            try:
                result = await _awaitable_steps(block, step(given))
            except StopAsyncIteration:
                return
            try:
                given = yield result
            except GeneratorExit:
                await _awaitable_steps(block, inner.aclose())
                raise
            except BaseException as error:
                step, given = inner.athrow, error
            else:
                step = inner.asend

    return run


def _steps(block: Block, inner: Resumable) -> Generator[Any, Any, Any]:
    """Does what `yield from inner` does, with each step of `inner` inside of `block`."""
    step: Callable[[Any], Any] = inner.send
    given: Any = None
    while True:
        try:
            with block:
                result = step(given)
        except StopIteration as stop:
            return stop.value
        try:
            given = yield result
        except GeneratorExit:
            with block:
                inner.close()
            raise
        except BaseException as error:
            step, given = inner.throw, error
        else:
            step = inner.send


_awaitable_steps = types.coroutine(_steps)
