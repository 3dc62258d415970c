"""Where the files of a dry run are: those that it writes in a folder of its own, all others where they were.

The folder has three parts. `written` has a file for each that the program has written, under its whole path. `gone`
has a mark for each path that the program has removed, so that what was there before is not found any more. `valueless`
has a mark for each file of tensors whose values do not exist. All processes of a dry run use the same folder.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Change", "Tree", "activate", "active", "exists_at", "os_error"]

# Not files: each process has its own, or they belong to devices.
ELSEWHERE = ("/dev", "/proc", "/sys")

MAX_LINKS = 40  # as Linux

_os_lstat = os.lstat
_os_readlink = os.readlink
_os_getcwd = os.getcwd
_os_listdir = os.listdir
_os_scandir = os.scandir
_os_rename = os.rename
_os_unlink = os.unlink
_os_rmdir = os.rmdir
_os_mkdir = os.mkdir
_os_chmod = os.chmod
_os_symlink = os.symlink
_os_access = os.access
_open = open


class Change(NamedTuple):
    """What a program has done to a path.

    Attributes:
        path: The path.
        what: `written`, `overwritten` or `removed`.
        nbytes: The size of the file that it would have written.
    """

    path: str
    what: str
    nbytes: int


def active() -> Tree | None:
    """Returns the files of the dry run that this process belongs to, or None."""
    return _active


_active: Tree | None = None


def activate(tree: Tree) -> None:
    """Makes `tree` the files of this process."""
    global _active
    _active = tree


class Tree:
    """The files as the program sees them.

    Paths are those of the program, absolute, without links and dots, where a function does not say otherwise. Not for
    several threads that write one file at once, as with any file.

    Args:
        folder: The folder of the dry run, which exists.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.realpath(folder)
        self.written = f"{self.folder}/written"
        self._gone = f"{self.folder}/gone"
        self._valueless = f"{self.folder}/valueless"
        for part in (self.written, self._gone, self._valueless):
            if not exists_at(part):
                _os_mkdir(part)

    # ---- Where a file is ----

    def program_path(self, path: str) -> str:
        """Returns the program's path for one in `written`."""
        if path == self.written or path.startswith(self.written + "/"):
            return path[len(self.written) :] or "/"
        return path

    def working_directory(self) -> str:
        """Returns the working directory that the program has entered."""
        return self.program_path(_os_getcwd())

    def resolve(self, path: str, *, follow: bool = True) -> str:
        """Returns the absolute path without links and dots; the last part may be a link unless `follow`."""
        found = "" if path.startswith("/") else self.working_directory().rstrip("/")
        parts = _parts(path)
        links = 0
        while parts:
            part = parts.pop()
            if part == "..":
                self._check_folder(found or "/")
                found = found.rpartition("/")[0]
                continue
            candidate = f"{found}/{part}"
            target = self._link_at(candidate, is_folder=bool(parts)) if parts or follow else None
            if target is None:
                found = candidate
                continue
            links += 1
            if links > MAX_LINKS:
                raise os_error(errno.ELOOP, path)
            found = "" if target.startswith("/") else found
            parts += _parts(target)
        return found or "/"

    def place(self, path: str) -> str:
        """Returns where the file at `path` is, or would be."""
        return self.written + path if self.has_own(path) else path

    def exists(self, path: str) -> bool:
        """Returns whether there is a file, folder or link at `path`."""
        return exists_at(self.place(path))

    def is_folder(self, path: str) -> bool:
        """Returns whether there is a folder at `path`, and no link to one."""
        return is_folder_at(self.place(path))

    def has_own(self, path: str) -> bool:
        """Returns whether what the program sees at `path` is not simply what was there before."""
        return not self._is_elsewhere(path) and (exists_at(self.written + path) or self._is_gone(path))

    def names_in(self, path: str) -> list[str]:
        """Returns the names in the folder at `path`.

        Raises:
            OSError: As `os.listdir()`.
        """
        if self._is_elsewhere(path):
            return _os_listdir(path)
        if not self.has_own(path):
            return self._names_left_in(path)
        names = _os_listdir(self.written + path)
        if not self._is_gone(path) and is_folder_at(path):
            names += [name for name in self._names_left_in(path) if not exists_at(_join(self.written + path, name))]
        return names

    def is_as_before(self, path: str) -> bool:
        """Returns whether the folder at `path` has in it what was there before."""
        return self._is_elsewhere(path) or not (self.has_own(path) or self._has_marks())

    # ---- Changing it ----

    def to_write(self, path: str, *, keep: bool) -> str:
        """Returns the place at which the program may write `path`.

        Args:
            path: A path.
            keep: Whether what is there stays, so that it has to be copied.

        Raises:
            PermissionError: The program could not write there.
        """
        if self._is_elsewhere(path):
            return path
        own = self.written + path
        if exists_at(own):
            return own
        there = self.place(path)
        if exists_at(there):
            self._check_writable(there)
            self._make_parents(path)
            if keep or is_folder_at(there):
                _copy(there, own)
        elif self._make_parents(path):
            self._check_writable(self.place(_parent_of(path)))
        return own

    def remove(self, path: str) -> None:
        """Removes a file or link.

        Raises:
            OSError: As `os.unlink()`.
        """
        there = self.place(path)
        if there == self.written + path or self._is_elsewhere(path):
            _os_unlink(there)
        elif is_folder_at(there):
            raise os_error(errno.EISDIR, path)
        else:
            _os_lstat(there)  # raises if there is nothing
            self._check_writable(_parent_of(path))
        self._mark_gone(path)

    def remove_folder(self, path: str) -> None:
        """Removes an empty folder.

        Raises:
            OSError: As `os.rmdir()`.
        """
        there = self.place(path)
        if self._is_elsewhere(path):
            _os_rmdir(there)
            return
        _os_lstat(there)  # raises if there is nothing
        if not is_folder_at(there):
            raise os_error(errno.ENOTDIR, path)
        if self.names_in(path):
            raise os_error(errno.ENOTEMPTY, path)
        if there == self.written + path:
            _os_rmdir(there)
        else:
            self._check_writable(_parent_of(path))
        self._mark_gone(path)

    def rename(self, source: str, target: str) -> None:
        """Renames a file, or a folder with all that is in it, which is copied if it was there before.

        Raises:
            OSError: As `os.rename()`.
        """
        if self._is_elsewhere(source) or self._is_elsewhere(target):
            _os_rename(self.place(source), self.place(target))
            return
        if source == target and self.exists(source):
            return
        self._check_rename(source, target)
        self.copy_up(source)
        is_folder = is_folder_at(self.written + source)
        own = self.to_write(target, keep=is_folder and self.exists(target))
        _os_rename(self.written + source, own)
        if is_folder:
            self._mark_gone(target)  # what was in a folder of that name is not in this one
        self._mark_gone(source)

    def copy_up(self, path: str) -> str:
        """Copies what is at `path`, with all that is in it, to its place in `written`, and returns the place."""
        own = self.to_write(path, keep=True)
        if is_folder_at(own):
            for name in self.names_in(path):
                self.copy_up(_join(path, name))
        return own

    def note_without_values(self, path: str) -> None:
        """Notes that the file at `path` looks like one of values, and has none."""
        self._make_mark(self._valueless, path)

    # ---- What has changed ----

    def without_values(self) -> list[str]:
        """Returns the paths that have been noted."""
        return list(_marked(self._valueless))

    def changes(self) -> list[Change]:
        """Returns what the program has written and removed, by path."""
        changes = []
        for path in self._written_files():
            what = "overwritten" if exists_at(path) else "written"
            changes.append(Change(path, what, _os_lstat(self.written + path).st_size))
        for path in _marked(self._gone):
            if exists_at(path) and not exists_at(self.written + path):
                changes.append(Change(path, "removed", 0))
        return sorted(changes)

    def _written_files(self) -> Iterator[str]:
        for folder, _, names in os.walk(self.written):
            for name in names:
                yield _join(self.program_path(folder), name)

    # ---- Details ----

    def _is_elsewhere(self, path: str) -> bool:
        return any(path == folder or path.startswith(folder + "/") for folder in (self.folder, *ELSEWHERE))

    def _link_at(self, path: str, *, is_folder: bool) -> str | None:
        """Returns what the link at `path` says, or None if there is none. Raises if it `is_folder`, and is none."""
        place = self.place(path)
        try:
            mode = _os_lstat(place).st_mode
        except OSError:
            return None
        if stat.S_ISLNK(mode):
            return _os_readlink(place)
        if is_folder and not stat.S_ISDIR(mode):
            raise os_error(errno.ENOTDIR, path)
        return None

    def _mark(self, path: str) -> str:
        return _mark_in(self._gone, path)

    def _has_marks(self) -> bool:
        with _os_scandir(self._gone) as marks:
            return next(marks, None) is not None

    def _names_left_in(self, path: str) -> list[str]:
        """Returns the names of what was in a folder before, without those that are gone."""
        names = _os_listdir(path)
        return [name for name in names if not exists_at(self._mark(_join(path, name)))] if self._has_marks() else names

    def _is_gone(self, path: str) -> bool:
        """Returns whether what was at `path` before is gone, perhaps with a folder that it was in."""
        if not self._has_marks():
            return False
        while path:
            if exists_at(self._mark(path)):
                return True
            path = path.rpartition("/")[0]
        return False

    def _mark_gone(self, path: str) -> None:
        if not self._is_elsewhere(path) and exists_at(path):
            self._make_mark(self._gone, path)

    @staticmethod
    def _make_mark(folder: str, path: str) -> None:
        with _open(_mark_in(folder, path), "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(path)

    def _make_parents(self, path: str) -> bool:
        """Makes the folders that `path` is in where they are found. Returns whether there is such a folder."""
        parent = _parent_of(path)
        if parent == "/" or exists_at(self.written + parent):
            return True
        there = self.place(parent)
        if not is_folder_at(there) or not self._make_parents(parent):
            return False
        _copy(there, self.written + parent)
        return True

    def _check_folder(self, path: str) -> None:
        if not stat.S_ISDIR(_os_lstat(self.place(path)).st_mode):
            raise os_error(errno.ENOTDIR, path)

    def _check_writable(self, there: str) -> None:
        if not stat.S_ISLNK(_os_lstat(there).st_mode) and not _os_access(there, os.W_OK):
            raise os_error(errno.EACCES, self.program_path(there))

    def _check_rename(self, source: str, target: str) -> None:
        _os_lstat(self.place(source))
        is_folder = self.is_folder(source)
        if is_folder and target.startswith(source + "/"):
            raise os_error(errno.EINVAL, source, target)
        if not self.exists(target):
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


def os_error(code: int, path: str, target: str | None = None) -> OSError:
    """Returns the error that the system raises with this code, of the class that Python has for it."""
    return OSError(code, os.strerror(code), path, None, target)


def _parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _mark_in(folder: str, path: str) -> str:
    name = hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()
    return f"{folder}/{name}"


def _marked(folder: str) -> Iterator[str]:
    for mark in _os_listdir(folder):
        with _open(f"{folder}/{mark}", encoding="utf-8", errors="surrogateescape") as file:
            yield file.read()


def _parts(path: str) -> list[str]:
    """Returns the parts of a path, the first one last."""
    return [part for part in reversed(path.split("/")) if part not in ("", ".")]


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"


def exists_at(place: str) -> bool:
    """Returns whether there is something at a place, which is no path of the program's."""
    try:
        _os_lstat(place)
    except (OSError, ValueError):
        return False
    return True


def is_folder_at(place: str) -> bool:
    """Returns whether there is a folder at a place."""
    try:
        return stat.S_ISDIR(_os_lstat(place).st_mode)
    except OSError:
        return False


def _copy(place: str, own: str) -> None:
    """Copies a file or link with its metadata, or makes an empty folder."""
    mode = _os_lstat(place).st_mode
    if stat.S_ISLNK(mode):
        _os_symlink(_os_readlink(place), own)
    elif stat.S_ISDIR(mode):
        _os_mkdir(own)
        _os_chmod(own, stat.S_IMODE(mode) | stat.S_IRWXU)
    else:
        shutil.copy2(place, own)
