"""Runs the process of a rank, and ends all that it has started: nothing is left behind after signals, either."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["ChildProcess", "raising_on_signals", "run_to_its_end"]

ENDING = (signal.SIGTERM, signal.SIGHUP)
PATIENCE = 5.0  # seconds that a program has to end after a signal


class ChildProcess:
    """A command that runs.

    Args:
        command: The command.
        environment: Its environment.
        mark: The name of a variable in it whose value only this command, and the processes that it starts, have.
        options: Those of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], mark: str, **options: Any) -> None:
        self._entry = f"{mark}={environment[mark]}".encode()
        self._process = subprocess.Popen(command, env=environment, **options)
        self._is_alone = False

    def poll(self) -> int | None:
        """Return the exit code, or None if it runs."""
        code = self._process.poll()
        if code is not None:
            self._end_what_it_has_started()
        return code

    def wait(self) -> int:
        """Return the exit code, when it has ended."""
        code = self._process.wait()
        self._end_what_it_has_started()
        return code

    def terminate(self) -> None:
        """Ask it to end, if it runs."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self, patience: float = PATIENCE) -> None:
        """End it, if it runs: by force after some seconds, at once without patience."""
        if self._process.poll() is None:
            if patience:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
            self._process.kill()
            self._process.wait()
        self._end_what_it_has_started()

    def _end_what_it_has_started(self) -> None:
        if self._is_alone:
            return
        self._is_alone = True
        for left in _processes_with(self._entry):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], mark: str) -> int:
    """Run a command, with the arguments of `ChildProcess`, and return its exit code.

    Raises:
        SystemExit: This process has received `SIGTERM` or `SIGHUP`.
    """
    with raising_on_signals():
        process = ChildProcess(command, environment, mark)
        try:
            return process.wait()
        finally:
            process.stop()


@contextmanager
def raising_on_signals() -> Iterator[None]:
    """Let signals that would end this process at once raise `SystemExit`, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return
    before = {number: signal.signal(number, _exit) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as shells report it


def _processes_with(entry: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
