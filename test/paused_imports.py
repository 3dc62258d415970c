"""An import on another thread that waits in the code of the module, until a test lets it end."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PausedImport", "paused_import"]

SECONDS = 60.0


class PausedImport:
    """A running import, made by `paused_import()`.

    Attributes:
        runs: How often the code of the module has run.
    """

    def __init__(self, name: str) -> None:
        self.runs = 0
        self._name = name
        self._has_begun, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._import)

    def _import(self) -> None:
        with contextlib.suppress(ImportError):
            importlib.import_module(self._name)

    def pause(self) -> None:
        """Wait, in the code of the module."""
        self.runs += 1
        self._has_begun.set()
        self._may_end.wait(SECONDS)

    def start(self) -> None:
        """Start the import, and wait until the code of the module runs."""
        self._thread.start()
        assert self._has_begun.wait(SECONDS)

    def finish(self) -> None:
        """Let the import end, and wait for it and for the threads that wait for it."""
        self._may_end.set()
        self._thread.join()
        for thread in threading.enumerate():
            if thread.name == f"torchext: wait for {self._name}":
                thread.join()


@contextlib.contextmanager
def paused_import(path: Path) -> Iterator[PausedImport]:
    """Import a module, whose code pauses before it does anything else, on another thread.

    Args:
        path: The file of the module, in a folder of `sys.path`. ImportErrors of its code are not reported.
    """
    path.write_text(f"import sys\nsys.paused_import.pause()\n{path.read_text()}")
    running = sys.paused_import = PausedImport(path.stem)  # type: ignore[attr-defined]
    try:
        running.start()
        yield running
    finally:
        running.finish()
        del sys.paused_import  # type: ignore[attr-defined]
