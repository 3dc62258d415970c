"""Replacements for Python functions that take file names, which use the files of a dry run: `overlay.py`."""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections.abc import Callable
from typing import Any

from .copying import send
from .descriptors import path_of
from .listing import Entry, Scan
from .originals import os_error, real
from .overlay import Overlay
from .program_descriptors import inherited_output, own_descriptor
from .tree import parent_of

__all__ = ["Function", "Replacements"]

Function = Callable[..., Any]

# `os` lacks functions that the system does not have.
READING = ("getxattr", "listxattr", "pathconf", "stat", "statvfs")
CHANGING = ("chmod", "chown", "lchown", "removexattr", "setxattr", "utime")
CHANGING_DESCRIPTORS = ("fchmod", "fchown", "ftruncate")
MAKING = ("mkdir", "mkfifo", "mknod")
OF_TWO_PATHS = frozenset({"link", "rename", "replace", "symlink"})

WRITES = os.O_WRONLY | os.O_RDWR
UNNAMED = getattr(os, "O_TMPFILE", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


class Replacements:
    """Creates functions that call those of `os` with the places of their files."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def of_os(self) -> dict[str, Function]:
        """Return the functions by name."""
        functions: dict[str, Function] = {}
        for name in READING:
            functions[name] = self.reading(getattr(real, name, None))
        for name in CHANGING:
            functions[name] = self._changing(getattr(real, name, None), follows=name != "lchown")
        for name in CHANGING_DESCRIPTORS:
            functions[name] = self._changing_descriptor(getattr(real, name, None))
        for name in MAKING:
            functions[name] = self._making(getattr(real, name, None))
        functions |= {
            "access": self._access,
            "chdir": self._chdir,
            "getcwd": self._overlay.working_directory,
            "getcwdb": lambda: os.fsencode(self._overlay.working_directory()),
            "link": self._link,
            "listdir": self._listdir,
            "lstat": self._lstat,
            "open": self._open,
            "readlink": self._readlink,
            "remove": self._unlink,
            "rename": self._rename,
            "replace": self._rename,
            "rmdir": self._rmdir,
            "scandir": self._scandir,
            "sendfile": lambda out_fd, in_fd, offset, count, **kwargs: send(out_fd, in_fd, offset, count, **kwargs),
            "symlink": self._symlink,
            "truncate": self._truncate,
            "unlink": self._unlink,
        }
        return {
            name: reporting(function, 2 if name in OF_TWO_PATHS else 1)
            for name, function in functions.items()
            if hasattr(real, name)
        }

    # ---- Paths ----

    def path(self, path: Any, folder: int | None = None, *, follow: bool = True) -> str:
        """Return the program's path for an argument, relative to `folder` if that is not None."""
        text = os.fsdecode(path)
        if not text:
            raise os_error(errno.ENOENT, text)
        if folder is not None and not text.startswith("/"):
            text = f"{self._path_of(folder)}/{text}"
        found = self._overlay.resolve(text, follow=follow or text.endswith("/"))
        if text.endswith("/") and self._overlay.exists(found) and not self._overlay.is_folder(found):
            raise os_error(errno.ENOTDIR, text)
        return found

    def _name(self, path: Any, folder: int | None = None) -> str:
        """Return the program's path for an argument that names a file or a link itself."""
        text = os.fsdecode(path)
        return self.path(text.rstrip("/") or text, folder, follow=False)

    def _check_slash(self, path: Any, found: str) -> None:
        """Raise if `path` ends with a slash, but names a file or link."""
        if os.fsdecode(path).endswith("/") and self._overlay.exists(found) and not self._overlay.is_folder(found):
            raise os_error(errno.ENOTDIR, found)

    def _path_of(self, descriptor: int) -> str:
        return self._overlay.program_path(path_of(descriptor))

    # ---- Reading ----

    def reading(self, original: Any) -> Function:
        """Return a replacement for a function whose first argument is a path to read, or a descriptor."""

        def read(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int) or path is None or (dir_fd is None and self._overlay.is_untouched()):
                return original(path, *args, **kwargs)
            found = self.path(path, dir_fd, follow=kwargs.get("follow_symlinks", True))
            return original(self._overlay.place(found), *args, **kwargs)

        return read

    def _access(self, path: Any, mode: int, *, dir_fd: int | None = None, **kwargs: Any) -> Any:
        try:
            found = self.path(path, dir_fd, follow=kwargs.get("follow_symlinks", True))
        except OSError:
            return False
        return real.access(self._overlay.place(found), mode, **kwargs)

    def _lstat(self, path: Any, *, dir_fd: int | None = None) -> Any:
        if dir_fd is None and self._overlay.is_untouched():
            return real.lstat(path)
        return real.lstat(self._overlay.place(self.path(path, dir_fd, follow=False)))

    def _readlink(self, path: Any, *, dir_fd: int | None = None) -> Any:
        found = self.path(path, dir_fd, follow=False)
        target = real.readlink(self._overlay.place(found))
        target = self._overlay.program_path(target) if found.startswith("/proc/") else target
        return os.fsencode(target) if isinstance(os.fspath(path), bytes) else target

    def _listdir(self, path: Any = None) -> list[Any]:
        names = self._overlay.names_in(self._folder(path))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = None) -> Any:
        folder = self._folder(path)
        has_path = path is not None and not isinstance(path, int)
        if has_path and self._overlay.is_untouched():
            return real.scandir(path)
        names = self._listdir(path)
        shown = os.fspath(path) if has_path else ""

        def entry(name: Any) -> Entry:
            return Entry(
                name, os.path.join(shown, name) if shown else name, f"{folder.rstrip('/')}/{os.fsdecode(name)}"
            )

        return Scan(map(entry, names))

    def _folder(self, path: Any) -> str:
        return self._path_of(path) if isinstance(path, int) else self.path("." if path is None else path)

    def _chdir(self, path: Any) -> None:
        real.chdir(path if isinstance(path, int) else self.folder_place(path))

    def folder_place(self, path: Any) -> str:
        """Return the place of a folder to enter: the original if it exists, where code in C finds other files."""
        found = self.path(path)
        return found if not self._overlay.is_gone(found) and stat_is_folder(found) else self._overlay.place(found)

    # ---- Opening ----

    def opener(self, path: Any, flags: int) -> int:
        """Open a file as `open()` does without an opener."""
        try:
            return self._open(path, flags, 0o666)
        except OSError as error:
            error.filename = path
            raise

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        output = inherited_output(self._overlay, path, flags)
        if output is not None:
            return int(real.dup(output))
        if flags & os.O_CREAT and os.fsdecode(path).endswith("/"):  # open() does not create folders
            found = self._name(path, dir_fd)
            raise os_error(errno.EISDIR if self._overlay.is_folder(parent_of(found)) else errno.ENOENT, found)
        is_exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        found = self.path(path, dir_fd, follow=not (is_exclusive or flags & NO_LINK))
        return int(real.open(self._place_to_open(found, flags), flags, mode))

    def _place_to_open(self, path: str, flags: int) -> str:
        if UNNAMED and flags & UNNAMED == UNNAMED:
            return self._overlay.to_write(path, keep=True)
        exists = self._overlay.exists(path)
        if exists and flags & os.O_CREAT and flags & os.O_EXCL:
            raise os_error(errno.EEXIST, path)
        if exists and flags & (WRITES | os.O_TRUNC) and not self._overlay.is_folder(path):
            return self._overlay.to_write(path, keep=not flags & os.O_TRUNC)
        return self._overlay.to_make(path) if flags & os.O_CREAT and not exists else self._overlay.place(path)

    # ---- Changing ----

    def _changing(self, original: Any, *, follows: bool) -> Function:
        def change(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int):
                own_descriptor(self._overlay, path)
                return original(path, *args, **kwargs)
            found = self.path(path, dir_fd, follow=follows and kwargs.get("follow_symlinks", True))
            return original(self._overlay.to_change(found), *args, **kwargs)

        return change

    def _changing_descriptor(self, original: Any) -> Function:
        def change(fd: int, *args: Any, **kwargs: Any) -> Any:
            own_descriptor(self._overlay, fd)
            return original(fd, *args, **kwargs)

        return change

    def _making(self, original: Any) -> Function:
        def make(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            return original(self._to_make(self._name(path, dir_fd)), *args, **kwargs)

        return make

    def _to_make(self, path: str) -> str:
        if self._overlay.exists(path):
            raise os_error(errno.EEXIST, path)
        return self._overlay.to_make(path)

    def _truncate(self, path: Any, length: int) -> None:
        if isinstance(path, int):
            own_descriptor(self._overlay, path)
            real.truncate(path, length)
        else:
            found = self.path(path)
            exists = self._overlay.exists(found)
            real.truncate(self._overlay.to_write(found, keep=True) if exists else self._overlay.place(found), length)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        found = self._name(path, dir_fd)
        self._check_slash(path, found)
        self._overlay.remove(found)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._overlay.remove_folder(self._name(path, dir_fd))

    def _rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        source, target = self._name(src, src_dir_fd), self._name(dst, dst_dir_fd)
        if self._overlay.exists(parent_of(target)):
            for path in (src, dst):
                self._check_slash(path, source)
        self._overlay.rename(source, target)

    # Linux never follows a link here; `follow_symlinks` has no effect.
    def _link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        self._overlay.link(self.path(src, src_dir_fd, follow=False), self.path(dst, dst_dir_fd, follow=False))

    def _symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        real.symlink(os.fsdecode(src), self._to_make(self.path(dst, dir_fd, follow=False)))


def stat_is_folder(path: str) -> bool:
    """Return true if the original at `path` is a folder."""
    try:
        return stat.S_ISDIR(real.stat(path).st_mode)
    except OSError:
        return False


def reporting(function: Function, paths: int = 1) -> Function:
    """Return `function`, whose errors name the first `paths` paths of its arguments instead of places."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, (str, bytes, os.PathLike))]
            for name, value in zip(("filename", "filename2")[:paths], given, strict=False):
                setattr(error, name, os.fspath(value))
            raise

    return call
