"""Runs random programs in another process, so that a hang or a crash is an ordinary failure.

A hang in C++ ignores signals, and a crash ends its process. So the process of the tests sends each program to a worker,
kills a worker that does not reply in time, and starts another one for the next program.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

__all__ = ["Watchdog"]

SECONDS_A_PROGRAM = 60.0
SECONDS_TO_START = 300.0


class Watchdog:
    """Calls `function` in a worker, which first calls `prepare`. Both must be functions of a module.

    Args:
        function: A test: it returns nothing, or raises an error.
        prepare: Called once in each worker.
        seconds: Time limit of a call before it counts as a hang.
    """

    def __init__(
        self, function: Callable[..., None], prepare: Callable[[], None], seconds: float = SECONDS_A_PROGRAM
    ) -> None:
        self._function = function
        self._prepare = prepare
        self._seconds = seconds
        self._worker: BaseProcess | None = None
        self._connection: Connection | None = None

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def failure(self, *args: object) -> str | None:
        """Call the function, and return the failure (a traceback, a hang or a signal), or None."""
        connection = self._started()
        try:
            connection.send(args)
            if not connection.poll(self._seconds):
                self._end()
                return f"hangs: no answer within {self._seconds:g} s"
            failure: str | None = connection.recv()
        except (EOFError, OSError):
            return f"ends the process: {self._exit_reason()}"
        return failure

    def _started(self) -> Connection:
        if self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, far_end = context.Pipe()
            self._worker = context.Process(target=_work, args=(far_end, self._function, self._prepare), daemon=True)
            self._worker.start()
            far_end.close()
            if not self._connection.poll(SECONDS_TO_START):
                raise TimeoutError(f"a worker has not started within {SECONDS_TO_START:g} s")
            self._connection.recv()
        return self._connection

    def _exit_reason(self) -> str:
        assert self._worker is not None
        self._worker.join()
        code = self._worker.exitcode or 0
        self._end()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def _end(self) -> None:
        if self._worker is not None and self._connection is not None:
            self._worker.kill()
            self._worker.join()
            self._connection.close()
        self._worker = self._connection = None


def _work(connection: Connection, function: Callable[..., None], prepare: Callable[[], None]) -> None:
    warnings.simplefilter("ignore")
    prepare()
    connection.send(None)
    while True:
        try:
            args = connection.recv()
        except EOFError:
            return
        connection.send(_failure_of(function, args))


def _failure_of(function: Callable[..., None], args: tuple[object, ...]) -> str | None:
    try:
        function(*args)
    except Exception:
        return traceback.format_exc(limit=-6)
    return None
