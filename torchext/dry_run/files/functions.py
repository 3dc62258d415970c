"""Replacements for Python functions that take file names, which use the files of a dry run: `overlay.py`."""

from __future__ import annotations

import _io
import errno
import functools
import importlib
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from .overlay import Overlay
from .tree import can_write, os_error, parent_of, path_of, real, reopen, send, when_imported

__all__ = [
    "Entry",
    "Function",
    "Replacements",
    "Scan",
    "inherited_output",
    "name_as",
    "own_descriptor",
    "replace_functions",
]


# ---- The names in a folder, as `os.scandir()` returns them


class Entry:
    """A name in a folder, with the interface of `os.DirEntry`.

    Args:
        name: The name.
        path: The path, which begins with the argument of `os.scandir()`.
        full_path: The absolute path.
    """

    def __init__(self, name: Any, path: Any, full_path: str) -> None:
        self.name = name
        self.path = path
        self._full_path = full_path

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the result of `os.DirEntry.stat()`."""
        return os.stat(self._full_path) if follow_symlinks else os.lstat(self._full_path)

    def inode(self) -> int:
        """Return the result of `os.DirEntry.inode()`."""
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return the result of `os.DirEntry.is_dir()`."""
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return the result of `os.DirEntry.is_file()`."""
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        """Return the result of `os.DirEntry.is_symlink()`."""
        return self._is(stat.S_ISLNK, follow_symlinks=False)

    def is_junction(self) -> bool:
        """Return the result of `os.DirEntry.is_junction()`."""
        return False

    def _is(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False


class Scan:
    """The iterator that `os.scandir()` returns."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> Scan:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Scan:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the iteration."""
        self._entries = iter(())


# ---- Descriptors of the program. A descriptor of an original is moved to a copy before a change through it


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


# ---- Functions of `os` that use the places of files


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


# ---- Replace Python functions in every module that refers to them
#
# The C modules from which `os` and `io` take their functions are changed as well. So Python's importer, which calls
# these, finds modules that the program has written, and a function is pickled under the name of the original.


def replace_functions(replacements: Replacements, others: dict[str, Function]) -> None:
    """Replace the functions of `os` and `io`.

    Args:
        replacements: Replacements for functions that take file names.
        others: Other replacements for functions of `os`, by name.
    """
    replaced = _Replaced()
    for name, function in {**replacements.of_os(), **others}.items():
        original = getattr(real, name, None)
        if original is None:
            continue
        replaced[original] = name_as(function, original)
        for capable in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if original in capable:
                capable.add(function)
    replaced[_io.open] = name_as(reporting(_opening(replacements)), _io.open)
    replaced[_io.open_code] = name_as(reporting(replacements.reading(_io.open_code)), _io.open_code)
    replaced[_io.FileIO] = _file_class(replacements)
    for module in (importlib.import_module(os.name), _io):
        _replace_in_module(module, replaced)
    _replace_kept(replaced)
    when_imported("pathlib", _unbind)


class _Replaced:
    """A mapping from originals to replacements. Some originals may have no hash."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def __setitem__(self, original: Any, replacement: Any) -> None:
        self._by_id[id(original)] = original, replacement

    def get(self, original: Any) -> Any:
        """Return the replacement of `original`, or `original` itself."""
        return self._by_id.get(id(original), (original, original))[1]


def name_as(function: Any, original: Any) -> Any:
    """Give a replacement the name of its original."""
    for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(function, attribute, getattr(original, attribute))
    return function


def _opening(replacements: Replacements) -> Function:
    original = _io.open

    def opening(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if opener is None and not isinstance(file, int):
            opener = replacements.opener
        return original(file, mode, buffering, encoding, errors, newline, closefd, opener)

    return opening


def _file_class(replacements: Replacements) -> type:
    original = _io.FileIO

    class AnyFile(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class FileIO(original, metaclass=AnyFile):  # type: ignore[misc, valid-type]
        def __init__(self, file: Any, mode: str = "r", closefd: bool = True, opener: Any = None) -> None:
            if opener is None and not isinstance(file, int):
                opener = replacements.opener
            super().__init__(file, mode, closefd, opener)

    return name_as(FileIO, original)  # type: ignore[no-any-return]


def _unbind(pathlib: Any) -> None:
    """Keep a class of `pathlib` before Python 3.11 from binding functions written in Python, as in `open = io.open`."""
    accessor = getattr(pathlib, "_NormalAccessor", None)
    for name, function in list(vars(accessor).items()) if accessor is not None else ():
        if isinstance(function, FunctionType) and function.__module__ != pathlib.__name__:
            setattr(accessor, name, staticmethod(function))


def _replace_kept(replaced: _Replaced) -> None:
    """Replace the functions in imported modules; `tempfile`, for example, has `unlink` as a default argument."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(__package__ or __name__):
            _replace_in_module(module, replaced)


def _replace_in_module(module: Any, replaced: _Replaced) -> None:
    own_classes = [
        value
        for value in getattr(module, "__dict__", {}).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for holder in [module, *own_classes]:
        for attribute, kept in list(getattr(holder, "__dict__", {}).items()):
            _replace_in(holder, attribute, kept, replaced)


def _replace_in(holder: Any, attribute: str, kept: Any, replaced: _Replaced) -> None:
    inner = kept.__func__ if isinstance(kept, staticmethod) else kept
    replacement = replaced.get(inner)
    if replacement is not inner:
        # A C function that is an attribute of a class, as in `pathlib` before Python 3.11, has no `self`.
        is_static = isinstance(holder, type) and isinstance(replacement, FunctionType)
        setattr(holder, attribute, staticmethod(replacement) if is_static else replacement)
    elif isinstance(inner, FunctionType) and inner.__defaults__:
        inner.__defaults__ = tuple(replaced.get(default) for default in inner.__defaults__)
