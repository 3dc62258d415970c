"""Open files: a descriptor of an original becomes one of its copy before anything is changed through it."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from typing import TYPE_CHECKING, Any

from .originals import os_error, real

if TYPE_CHECKING:
    from .overlay import Overlay

__all__ = ["inherited_output", "own_descriptor", "path_of", "reopen_readers"]

DESCRIPTORS = "/proc/self/fd"
NAMES = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def path_of(descriptor: int) -> str:
    """Return the real path of an open file, or a name that does not begin with a slash, as `pipe:[7]`."""
    path: str = real.readlink(f"{DESCRIPTORS}/{descriptor}")
    return path


def reopen_readers(status: os.stat_result, copy: str) -> None:
    """Let the descriptors of this process that read an original read its copy from now on, where they are in it."""
    with contextlib.suppress(FileNotFoundError):  # systems without /proc
        for descriptor in map(int, real.listdir(DESCRIPTORS)):
            with contextlib.suppress(OSError):
                if os.path.samestat(real.fstat(descriptor), status) and not _can_write(descriptor):
                    _reopen(descriptor, copy)


def own_descriptor(overlay: Overlay, descriptor: int) -> None:
    """Let `descriptor` be one of the program's own files, whose metadata may change.

    Raises:
        PermissionError: It is a file that the program has inherited to write into, such as redirected output, or a
            device.
    """
    status = real.fstat(descriptor)
    path = path_of(descriptor)
    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or _is_own(overlay, descriptor, path):
        return
    is_file, is_folder = stat.S_ISREG(status.st_mode), stat.S_ISDIR(status.st_mode)
    if not (is_file or is_folder) or _can_write(descriptor):
        raise os_error(errno.EPERM, path)
    copy = overlay.copied(status) if is_file else None
    if copy is None:
        if not os.path.samestat(real.lstat(path), status):
            raise os_error(errno.EPERM, path)
        copy = overlay.copy_up(path)
    if os.path.samestat(real.fstat(descriptor), status):
        _reopen(descriptor, copy)


def inherited_output(overlay: Overlay, path: Any, flags: int) -> int | None:
    """Return the descriptor that `path` names, as `/dev/stdout` does, if the program has inherited it to write into.

    Linux opens the file behind it again. Such a file is an original, as the log that a shell has opened, and is only
    written into through this descriptor.
    """
    if not flags & (os.O_WRONLY | os.O_RDWR) or isinstance(path, int):
        return None
    name = os.fsdecode(path)
    found = re.fullmatch(rf"(?:/dev/fd|/proc/(?:self|thread-self|{os.getpid()})/fd)/(\d+)", name)
    descriptor = int(found[1]) if found else NAMES.get(name)
    if descriptor is None:
        return None
    try:
        place = path_of(descriptor)
        is_output = stat.S_ISREG(real.fstat(descriptor).st_mode) and _can_write(descriptor)
    except OSError:
        return None
    return descriptor if is_output and not _is_own(overlay, descriptor, place) else None


def _is_own(overlay: Overlay, descriptor: int, place: str) -> bool:
    """Files without a name, and the shared memory that code in C has made, belong to the program as well."""
    if overlay.is_inside(place) or place.startswith("/memfd:") or not place.startswith("/"):
        return True
    return place.startswith("/dev/shm/") and _can_write(descriptor)


def _can_write(descriptor: int) -> bool:
    return bool(_flags(descriptor) & (os.O_WRONLY | os.O_RDWR))


def _flags(descriptor: int) -> int:
    import fcntl

    return fcntl.fcntl(descriptor, fcntl.F_GETFL)


def _reopen(descriptor: int, copy: str) -> None:
    flags = _flags(descriptor) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
    opened = real.open(copy, flags | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # folders of which no position is known
            real.lseek(opened, real.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        real.dup2(opened, descriptor, real.get_inheritable(descriptor))
    finally:
        real.close(opened)
