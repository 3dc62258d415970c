"""Write on a separate thread, while the next piece is computed."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

import torch
from typing_extensions import Self

from .folder import IncompleteFile

__all__ = ["Writer"]

PATIENCE = 0.02
"""The time in seconds that the thread waits for a task before it checks whether more will come."""


class _Piece(NamedTuple):
    file: IncompleteFile
    tensor: torch.Tensor
    at: int


class Writer:
    """Write pieces, and complete files, in the order of the calls.

    One piece waits while another one is written. The next call raises the error of an earlier one.

    Args:
        on_written: Called with the number of bytes of each written piece.
    """

    def __init__(self, on_written: Callable[[int], object] | None) -> None:
        self._on_written = on_written
        self._tasks: queue.Queue[_Piece | IncompleteFile] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchext checkpoint writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait until the thread has ended, also if the wait is interrupted, because the files are closed after this."""
        if error is not None and self._error is None:
            self._error = error  # waiting pieces are dropped
        self._is_ending.set()
        while self._thread.is_alive():
            try:
                self._thread.join()
            except BaseException as interrupt:
                self._error = self._error or interrupt
        if error is None:
            self._check()

    def write(self, file: IncompleteFile, tensor: torch.Tensor, at: int) -> None:
        """Write the elements of `tensor`, which is contiguous and on the CPU, `at` bytes from the beginning."""
        self._check()
        if tensor.numel() > 0:
            self._tasks.put(_Piece(file, tensor, at))

    def complete(self, file: IncompleteFile) -> None:
        """Rename the file to its final name after all earlier pieces."""
        self._check()
        self._tasks.put(file)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=PATIENCE)
            except queue.Empty:
                if self._is_ending.is_set():
                    return
                continue
            if self._error is None:
                try:
                    self._do(task)
                except BaseException as error:
                    self._error = error
            del task  # frees the memory of the piece

    def _do(self, task: _Piece | IncompleteFile) -> None:
        if isinstance(task, IncompleteFile):
            task.complete()
            return
        nbytes = task.tensor.numel() * task.tensor.itemsize
        task.file.write(memoryview((ctypes.c_ubyte * nbytes).from_address(task.tensor.data_ptr())), task.at)
        if self._on_written is not None:
            self._on_written(nbytes)
