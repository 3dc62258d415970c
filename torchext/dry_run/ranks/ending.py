"""Run the process of a rank, and end it and its child processes, also after signals."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from typing_extensions import Self

__all__ = ["PATIENCE", "TICK", "ChildProcess", "Patience", "raising_on_signals", "run_to_its_end"]

ENDING = (signal.SIGTERM, signal.SIGHUP)
PATIENCE = 5.0  # seconds that programs have to end after a signal
TICK = 0.05  # seconds between checks whether a process has ended


class Patience:
    """A block that gives a group of processes some seconds to end, and less if a signal arrives.

    Signals do not interrupt the block. The last one is raised again after it.
    """

    def __init__(self, seconds: float = PATIENCE) -> None:
        self._deadline = time.monotonic() + seconds
        self._signal: int | None = None
        self._handlers = ExitStack()

    @property
    def is_left(self) -> bool:
        """Whether processes still have time to end."""
        return self._signal is None and time.monotonic() < self._deadline

    def __enter__(self) -> Self:
        self._handlers.enter_context(_handling(self._lose, (signal.SIGINT, *ENDING)))
        return self

    def __exit__(self, *error: object) -> None:
        self._handlers.close()
        if self._signal is not None:
            signal.raise_signal(self._signal)

    def _lose(self, number: int, frame: FrameType | None) -> None:
        self._signal = number


class ChildProcess:
    """A running command.

    Args:
        command: The command.
        environment: Its environment.
        mark: The name of an environment variable. Only this command and its child processes have its value.
        options: Further arguments of `subprocess.Popen`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], mark: str, **options: Any) -> None:
        self._entry = f"{mark}={environment[mark]}".encode()
        self._process = subprocess.Popen(command, env=environment, **options)
        self._is_terminating = False
        self._is_alone = False

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            self._kill_descendants()
        return code

    def wait(self) -> int:
        """Wait until the command ends, and return its exit code."""
        code = self._process.wait()
        self._kill_descendants()
        return code

    def terminate(self) -> None:
        """Send SIGTERM if the command runs, once."""
        if not self._is_terminating and self._process.poll() is None:
            self._is_terminating = True
            self._process.terminate()

    def stop(self, patience: Patience | None = None) -> None:
        """End the command if it runs: send SIGTERM if there is time, then SIGKILL."""
        if patience is not None:
            self.terminate()
            while self._process.poll() is None and patience.is_left:
                time.sleep(TICK)
        self._process.kill()
        self._process.wait()
        self._kill_descendants()

    def _kill_descendants(self) -> None:
        if self._is_alone:
            return
        self._is_alone = True
        for left in _processes_with(self._entry):
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], mark: str, **options: Any) -> int:
    """Run a command, with the arguments of `ChildProcess`, and return its exit code.

    Raises:
        SystemExit: This process has received `SIGTERM` or `SIGHUP`.
    """
    with raising_on_signals():
        process = ChildProcess(command, environment, mark, **options)
        try:
            return process.wait()
        finally:
            with Patience() as patience:
                process.stop(patience)


def raising_on_signals() -> AbstractContextManager[None]:
    """Raise `SystemExit` for signals that would end this process at once, so that temporary files are removed."""
    return _handling(_exit, ENDING)


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], numbers: Sequence[int]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers only there
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, original in before.items():
            signal.signal(number, original)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # as shells report it


def _processes_with(entry: bytes) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
