"""Count the lines of Python and C++ in each process of `.ci/coverage`; Python runs this module when it starts."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from typing import NoReturn

import coverage

coverage.process_startup()
_leave = os._exit  # coverage has replaced it: it saves the counts of Python lines first


def _write_to(path: str, data: bytes) -> None:
    """Write a file with functions of C, because a dry run redirects those of Python."""
    library = ctypes.CDLL(None)
    file = library.open(path.encode(), os.O_CREAT | os.O_WRONLY, 0o644)
    if file < 0 or library.write(file, data, ctypes.c_size_t(len(data))) != len(data):
        raise OSError(f"cannot write counts to {path}")
    library.close(file)


def _write_counts_and_leave(status: int) -> NoReturn:
    if "torchext._C" in sys.modules:
        folder = str(sys.modules["torchext._C"].__file__).rpartition("/")[0]
        ctypes.CDLL(f"{folder}/lib/libtorchext.so").torchextWriteCounts()
    _dump_counts()
    _leave(status)


@atexit.register  # so it runs before coverage saves and closes its counts
def _dump_counts() -> None:
    measured = coverage.Coverage.current()
    if measured is not None and "TORCHEXT_DRY_RUN_FILES" in os.environ:
        measured.stop()
        name = f"{os.getpid()}.{os.times().elapsed}"
        _write_to(f"{os.environ['TORCHEXT_COVERAGE_DUMPS']}/{name}", measured.get_data().dumps())


os._exit = _write_counts_and_leave
