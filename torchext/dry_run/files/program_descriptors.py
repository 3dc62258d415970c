"""Descriptors of the program. A descriptor of an original is moved to a copy before a change through it."""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import Any

from .descriptors import can_write, path_of, reopen
from .originals import os_error, real
from .overlay import Overlay

__all__ = ["inherited_output", "own_descriptor"]

NAMES = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}


def own_descriptor(overlay: Overlay, descriptor: int) -> None:
    """Make `descriptor` refer to a file of the program, whose metadata may change.

    Raises:
        PermissionError: It refers to an inherited file that is open for writing, such as redirected output, or to a
            device.
        FileNotFoundError: The program has removed the file.
    """
    status = real.fstat(descriptor)
    path = path_of(descriptor)
    if stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode) or _is_own(overlay, descriptor, path):
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)) or can_write(descriptor):
        raise os_error(errno.EPERM, path)
    if overlay.is_gone(path) or not os.path.samestat(real.lstat(path), status):
        copy = overlay.copy_place(status)  # independent of its current name
    else:
        copy = overlay.copy_up(path)
    if os.path.samestat(real.fstat(descriptor), status):
        reopen(descriptor, copy)


def inherited_output(overlay: Overlay, path: Any, flags: int) -> int | None:
    """Return the descriptor that `path` names, such as `/dev/stdout`, if it is inherited and open for writing.

    Linux would open its file again. Such a file is an original, for example a log that a shell has opened, and may only
    be written through this descriptor.
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
        is_output = stat.S_ISREG(real.fstat(descriptor).st_mode) and can_write(descriptor)
    except OSError:
        return None
    return descriptor if is_output and not _is_own(overlay, descriptor, place) else None


def _is_own(overlay: Overlay, descriptor: int, place: str) -> bool:
    """Return true for files of the program, including files without a name, and shared memory of code in C."""
    if overlay.is_inside(place) or place.startswith("/memfd:") or not place.startswith("/"):
        return True
    return place.startswith("/dev/shm/") and can_write(descriptor)
