"""Change files in a dry run: copies, never the originals."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
import threading
from collections.abc import Iterator
from typing import NamedTuple

from .tree import (
    Tree,
    copy_alike,
    copy_file,
    exists_at,
    is_folder_at,
    join,
    make_folder,
    os_error,
    parent_of,
    real,
    reopen_readers,
)

__all__ = ["PLACEHOLDER", "Change", "Overlay", "activate", "active", "changes_in", "keep_files"]


def active() -> Overlay | None:
    """Return the files of the dry run that this process belongs to, or None."""
    return _active


_active: Overlay | None = None


def activate(overlay: Overlay) -> None:
    """Make `overlay` the files of this process."""
    global _active
    _active = overlay


class Overlay(Tree):
    """The files from the view of the program, with its changes.

    Several threads and processes may use it at the same time: a copy appears complete, and only once.
    """

    _numbers = itertools.count()

    # ---- Places to write ----

    def to_write(self, path: str, *, keep: bool) -> str:
        """Return the place where the program may write `path`.

        Args:
            path: A path.
            keep: Whether to keep the bytes; false if the program overwrites all of them.

        Raises:
            PermissionError: The program has no permission to write `path`.
        """
        if not self.exists(path):
            return self.to_make(path)
        if not exists_at(self.own(path)):
            self._check_writable(path)
        return self.copy_up(path, keep=keep)

    def to_change(self, path: str) -> str:
        """Return the place of the file at `path`, whose metadata the program may change.

        Raises:
            PermissionError: The file belongs to another user, or is a device.
        """
        status = real.lstat(self.place(path))
        place = self.copy_up(path)
        if place != self.own(path) or os.geteuid() not in (0, status.st_uid):
            raise os_error(errno.EPERM, path)
        return place

    def to_make(self, path: str) -> str:
        """Return the place of a new file, after creating copies of the folders around it."""
        own = self.own(path)
        if own != path and self._make_parents(path):
            self._check_writable(parent_of(path))
        return own

    def copy_up(self, path: str, *, keep: bool = True) -> str:
        """Copy the file at `path`, or the folder without its contents, and return the place of the copy.

        Devices, and FIFOs and sockets of other programs, are not copied: their own place is returned.
        """
        own = self.own(path)
        if exists_at(own):
            return own
        status = real.lstat(own if self.is_gone(path) else path)
        if stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            return path
        self._make_parents(path)
        if not stat.S_ISREG(status.st_mode):
            copy_alike(path, own)
        else:
            copy = self._copy_of(path, status, keep=keep or status.st_nlink > 1)
            with contextlib.suppress(FileExistsError):
                real.link(copy, own)
            reopen_readers(status, own)
        return own

    def copy_up_all(self, path: str) -> None:
        """Copy the file or the folder at `path`, with all its contents."""
        own = self.own(path)
        if self.copy_up(path) != own:
            self._make_parents(path)
            copy_alike(path, own)
        if is_folder_at(own) and own != path:
            for name in self.names_in(path):
                self.copy_up_all(join(path, name))

    def _copy_of(self, path: str, status: os.stat_result, *, keep: bool) -> str:
        copy = self.copy_place(status)
        if exists_at(copy):
            return copy
        make_folder(parent_of(copy))
        part = f"{self.parts}/{os.getpid()}-{threading.get_ident()}-{next(self._numbers)}"
        copy_file(path, part, content=keep)
        with contextlib.suppress(FileExistsError):
            real.link(part, copy)
        real.unlink(part)
        return copy

    def _make_parents(self, path: str) -> bool:
        """Create the folders around `path` in `written`. Return true if they exist for the program."""
        parent = parent_of(path)
        if parent == "/" and not self.is_real(path):
            make_folder(self.written)
        if exists_at(self.own(parent)):
            return True
        there = self.place(parent)
        if not is_folder_at(there) or not self._make_parents(parent):
            return False
        copy_alike(there, self.own(parent))
        return True

    def _check_writable(self, path: str) -> None:
        place = self.place(path)
        if not stat.S_ISLNK(real.lstat(place).st_mode) and not real.access(place, os.W_OK):
            raise os_error(errno.EACCES, path)

    # ---- Changes ----

    def remove(self, path: str) -> None:
        """Remove a file or link.

        Raises:
            OSError: `os.unlink()` would fail.
        """
        self._remove(path, is_folder=False)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder.

        Raises:
            OSError: `os.rmdir()` would fail.
        """
        self._remove(path, is_folder=True)

    def _remove(self, path: str, *, is_folder: bool) -> None:
        there = self.place(path)
        is_one = stat.S_ISDIR(real.lstat(there).st_mode)
        if is_one != is_folder:
            raise os_error(errno.EISDIR if is_one else errno.ENOTDIR, path)
        if is_folder and self.names_in(path):
            raise os_error(errno.ENOTEMPTY, path)
        if there != self.own(path):
            self._check_writable(parent_of(path))
        self.mark_gone(path)
        if there == self.own(path):
            (real.rmdir if is_folder else real.unlink)(there)

    def rename(self, source: str, target: str) -> None:
        """Rename a file, or a folder with all its contents. Originals are copied first.

        Raises:
            OSError: `os.rename()` would fail.
        """
        self._check_rename(source, target)
        if source == target:
            return
        self._check_writable(parent_of(source))
        own = self.to_make(target)
        self.copy_up_all(source)
        is_folder = self.is_folder(source)
        self.mark_gone(source)
        if is_folder:
            self.mark_gone(target)  # hides the names in it, which would appear in the renamed folder
        real.rename(self.own(source), own)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name.

        Raises:
            OSError: `os.link()` would fail.
        """
        mode = real.lstat(self.place(source)).st_mode
        if self.exists(target) or stat.S_ISDIR(mode):
            raise os_error(errno.EEXIST if self.exists(target) else errno.EPERM, source, target)
        self.copy_up_all(source)
        own = self.to_make(target)
        if source.startswith(
            "/proc/"
        ):  # an open file that may have no name yet; the system follows the link only with a folder descriptor
            real.link(source, own, src_dir_fd=0, follow_symlinks=True)
        else:
            real.link(self.own(source), own)

    def _check_rename(self, source: str, target: str) -> None:
        real.lstat(self.place(source))
        is_folder = self.is_folder(source)
        if is_folder and target.startswith(source + "/"):
            raise os_error(errno.EINVAL, source, target)
        if not self.exists(target) or source == target:
            return
        code = 0
        if source.startswith(target + "/"):
            code = errno.ENOTEMPTY
        elif self.is_folder(target) and not is_folder:
            code = errno.EISDIR
        elif is_folder and not self.is_folder(target):
            code = errno.ENOTDIR
        elif is_folder and self.names_in(target):
            code = errno.ENOTEMPTY
        if code:
            raise os_error(code, source, target)


# ---- The changes that a dry run would have made, for the report and for `--keep-files`


# The first bytes of files of tensors without values. They identify such a file under any name.
PLACEHOLDER = b"torchext: tensors without values, of a dry run\n"


class Change(NamedTuple):
    """A change of a file.

    Attributes:
        path: The path of the file.
        what: `written`, `overwritten` or `removed`.
        nbytes: The size of the written file.
    """

    path: str
    what: str
    nbytes: int


def changes_in(tree: Tree) -> list[Change]:
    """Return the files that the program has written or removed, sorted by path."""
    changes = []
    for path in _written_files(tree):
        if not exists_at(path):
            changes.append(Change(path, "written", real.lstat(tree.own(path)).st_size))
        elif not _is_alike(real.lstat(path), real.lstat(tree.own(path))):
            changes.append(Change(path, "overwritten", real.lstat(tree.own(path)).st_size))
    for path in tree.gone_paths():
        if exists_at(path) and not exists_at(tree.own(path)):
            changes.append(Change(path, "removed", 0))
    return sorted(changes)


def keep_files(tree: Tree, folder: str) -> None:
    """Copy the written files to `folder`, except checkpoints without values."""
    os.makedirs(folder, exist_ok=True)
    for place, folders, names in os.walk(tree.written):
        target = folder + tree.program_path(place).rstrip("/")
        os.makedirs(target, exist_ok=True)
        for name in names + folders:
            source, kept = join(place, name), join(target, name)
            mode = os.lstat(source).st_mode
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(source), kept)
            elif stat.S_ISREG(mode) and not _is_placeholder(source):
                copy_file(source, kept, content=True)


def _written_files(tree: Tree) -> Iterator[str]:
    for folder, _, names in os.walk(tree.written):
        for name in names:
            yield join(tree.program_path(folder), name)


def _is_alike(one: os.stat_result, other: os.stat_result) -> bool:
    """Return true if a copy still has the metadata of its original, such as that of a database that was only read."""
    return all(
        getattr(one, name) == getattr(other, name) for name in ("st_mode", "st_uid", "st_gid", "st_size", "st_mtime_ns")
    )


def _is_placeholder(place: str) -> bool:
    with open(place, "rb") as file:
        return file.read(len(PLACEHOLDER)) == PLACEHOLDER
