"""Copy files, links and folders with their metadata. An overlay changes copies instead of the originals."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import Any

from .originals import os_error, real

__all__ = ["copy_alike", "copy_file", "copy_range", "exists_at", "is_folder_at", "send"]

CHUNK = 1 << 24


def exists_at(place: str) -> bool:
    """Return true if a file, folder or link exists at a real path."""
    try:
        real.lstat(place)
    except (OSError, ValueError):
        return False
    return True


def is_folder_at(place: str) -> bool:
    """Return true if a folder exists at a real path."""
    try:
        return stat.S_ISDIR(real.lstat(place).st_mode)
    except (OSError, ValueError):
        return False


def copy_file(place: str, copy: str, *, content: bool) -> None:
    """Copy a regular file to `copy`, which must not exist; without its bytes unless `content`."""
    source = real.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        target = real.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            status = real.fstat(source)
            if content:
                copy_range(source, target, status.st_size)
            _copy_metadata(source, target, status)
        finally:
            real.close(target)
    finally:
        real.close(source)


def copy_range(source: int, target: int, size: int) -> None:
    """Copy the first `size` bytes of a file to an empty file. Holes, such as those of placeholders, stay holes."""
    begin = 0
    while begin < size:
        begin = _seek(source, begin, os.SEEK_DATA)
        end = _seek(source, begin, os.SEEK_HOLE)
        real.lseek(target, begin, os.SEEK_SET)
        while begin < end:
            sent = real.sendfile(target, source, begin, min(end - begin, CHUNK))
            if not sent:
                break
            begin += sent
    real.ftruncate(target, size)


def send(target: int, source: int, offset: int | None, count: int, **options: Any) -> int:
    """Call `os.sendfile()`, but copy a hole as a hole: placeholders of checkpoints are large and nearly empty."""
    if offset is None or not all(stat.S_ISREG(real.fstat(file).st_mode) for file in (target, source)):
        return int(real.sendfile(target, source, offset, count, **options))
    before = real.lseek(source, 0, os.SEEK_CUR)
    data, hole = (_seek(source, offset, kind) for kind in (os.SEEK_DATA, os.SEEK_HOLE))
    real.lseek(source, before, os.SEEK_SET)
    if data <= offset:
        return int(real.sendfile(target, source, offset, min(count, hole - offset) or count, **options))
    length = min(data - offset, count)
    end = real.lseek(target, length, os.SEEK_CUR)
    if end > real.fstat(target).st_size:
        real.ftruncate(target, end)
    return length


def _seek(file: int, offset: int, kind: int) -> int:
    """Return the offset of the next data or hole, or the end of the file."""
    try:
        return int(real.lseek(file, offset, kind))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return max(offset, int(real.fstat(file).st_size))


def copy_alike(place: str, own: str) -> None:
    """Copy a link, an empty folder, a FIFO or a socket, unless another process has just done so."""
    status = real.lstat(place)
    with contextlib.suppress(FileExistsError):
        if stat.S_ISLNK(status.st_mode):
            real.symlink(real.readlink(place), own)
        elif stat.S_ISDIR(status.st_mode):
            real.mkdir(own, 0o700)
            _copy_metadata(place, own, status)
            real.chmod(own, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
        elif stat.S_ISREG(status.st_mode) or stat.S_ISBLK(status.st_mode) or stat.S_ISCHR(status.st_mode):
            raise os_error(errno.EPERM, place)
        else:
            real.mknod(own, status.st_mode)


def _copy_metadata(source: Any, target: Any, status: os.stat_result) -> None:
    with contextlib.suppress(OSError):  # only root may change owners
        real.chown(target, status.st_uid, status.st_gid)
    real.chmod(target, stat.S_IMODE(status.st_mode))
    with contextlib.suppress(OSError):  # some file systems have no extended attributes
        for name in real.listxattr(source):
            real.setxattr(target, name, real.getxattr(source, name))
    real.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
