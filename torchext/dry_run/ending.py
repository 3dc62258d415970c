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

__all__ = ["run_to_its_end"]

ENDING = (signal.SIGTERM, signal.SIGHUP)
PATIENCE = 5.0  # seconds that a program has to end after a signal


def run_to_its_end(command: Sequence[str], environment: Mapping[str, str], mark: str) -> int:
    """Run a command and return its exit code.

    Args:
        command: The command.
        environment: Its environment.
        mark: The name of a variable in it whose value only this command, and the processes that it starts, have.

    Raises:
        SystemExit: This process has received `SIGTERM` or `SIGHUP`.
    """
    entry = f"{mark}={environment[mark]}".encode()
    with _raising_on_signals():
        process = subprocess.Popen(command, env=environment)
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()
            process.wait()
            raise
        finally:
            for left in _processes_with(entry):
                with suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)


@contextmanager
def _raising_on_signals() -> Iterator[None]:
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
