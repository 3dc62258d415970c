"""Descriptors of open files, as Linux lists them in `/proc`."""

from __future__ import annotations

import contextlib
import os

from .originals import real

__all__ = ["can_write", "path_of", "reopen", "reopen_readers"]

DESCRIPTORS = "/proc/self/fd"


def path_of(descriptor: int) -> str:
    """Return the real path of an open file, or a name without a leading slash, such as `pipe:[7]`."""
    path: str = real.readlink(f"{DESCRIPTORS}/{descriptor}")
    return path


def reopen_readers(status: os.stat_result, copy: str) -> None:
    """Make the descriptors of this process that read an original read its copy from now on, at the same position."""
    with contextlib.suppress(FileNotFoundError):  # systems without /proc
        for descriptor in map(int, real.listdir(DESCRIPTORS)):
            with contextlib.suppress(OSError):
                if os.path.samestat(real.fstat(descriptor), status) and not can_write(descriptor):
                    reopen(descriptor, copy)


def can_write(descriptor: int) -> bool:
    """Return true if a descriptor is open for writing."""
    return bool(_flags(descriptor) & (os.O_WRONLY | os.O_RDWR))


def _flags(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def reopen(descriptor: int, copy: str) -> None:
    """Make a descriptor refer to another file from now on, at the same position."""
    flags = _flags(descriptor) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
    opened = real.open(copy, flags | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some folders have no position
            real.lseek(opened, real.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        real.dup2(opened, descriptor, real.get_inheritable(descriptor))
    finally:
        real.close(opened)
