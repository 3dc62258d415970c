"""Replaces the functions of Python that name files, so that they find those of the dry run: `tree.py`."""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

from .libraries import tell_libraries
from .tree import Tree, activate, exists_at, os_error

__all__ = ["install"]

Function = Callable[..., Any]

WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = WRITES | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# Where the system does not have a function, neither has `os`.
READING = ("getxattr", "listxattr", "pathconf", "readlink", "stat", "statvfs")
CHANGING = ("chmod", "chown", "lchown", "removexattr", "setxattr", "utime")
MAKING = ("mkdir", "mkfifo", "mknod")
NOT_FOLLOWING = frozenset({"lchown", "readlink"})
OF_TWO_PATHS = frozenset({"link", "rename", "replace", "symlink"})


def install(folder: str) -> Tree:
    """Has this process keep its files in `folder`, for good.

    Returns:
        The files.
    """
    tree = Tree(folder)
    replaced: dict[Function, Function] = {}
    replacements = _Replacements(tree)
    for name, replacement in replacements.of_os().items():
        original = getattr(os, name, None)
        if original is not None:
            replaced[original] = _replace_in_os(name, replacement)
    replaced[io.open] = opening = _reporting(replacements.open_file(io.open))
    replaced[io.open_code] = opening_code = _reporting(replacements.reading(io.open_code))
    builtins.open = io.open = opening
    io.open_code = opening_code
    _replace_kept(replaced)
    _let_imports_find(tree)
    tell_libraries(tree)
    activate(tree)
    return tree


def _replace_in_os(name: str, replacement: Function) -> Function:
    original = getattr(os, name)
    function = functools.wraps(original)(replacement)
    setattr(os, name, function)
    for capable in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if original in capable:
            capable.add(function)
    return function


def _replace_kept(replaced: dict[Function, Function]) -> None:
    """Replaces the functions in modules that have been imported before, as `tempfile` has `unlink` for a default."""
    own = {__name__, f"{__package__}.tree", "posix", "_io"}
    for name, module in list(sys.modules.items()):
        if name in own or name.startswith(("importlib", "_frozen_importlib")):
            continue
        for holder in [module, *(kept for kept in _values_of(module) if isinstance(kept, type))]:
            for attribute, kept in list(getattr(holder, "__dict__", {}).items()):
                _replace_in(holder, attribute, kept, replaced)


def _values_of(module: Any) -> list[Any]:
    return [value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__]


def _replace_in(holder: Any, attribute: str, kept: Any, replaced: dict[Function, Function]) -> None:
    inner = kept.__func__ if isinstance(kept, staticmethod) else kept
    if isinstance(inner, BuiltinFunctionType) and inner in replaced:
        setattr(holder, attribute, staticmethod(replaced[inner]) if isinstance(kept, staticmethod) else replaced[inner])
    elif isinstance(inner, FunctionType) and inner.__defaults__:
        inner.__defaults__ = tuple(
            replaced.get(default, default) if isinstance(default, BuiltinFunctionType) else default
            for default in inner.__defaults__
        )


def _reporting(function: Function, paths: int = 1) -> Function:
    """Calls `function`, whose errors name the paths that it was given, of which there are `paths`, and no places."""

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


class _Replacements:
    """Makes functions that call those of `os` with the places of their files."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def of_os(self) -> dict[str, Function]:
        """Returns the functions by name."""
        functions: dict[str, Function] = {}
        for name in READING:
            functions[name] = self.reading(getattr(os, name, None), follows=name not in NOT_FOLLOWING)
        for name in CHANGING:
            functions[name] = self._changing(getattr(os, name, None), follows=name not in NOT_FOLLOWING)
        for name in MAKING:
            functions[name] = self._making(getattr(os, name, None))
        functions |= {
            "access": self._access,
            "chdir": self._chdir,
            "getcwd": self._tree.working_directory,
            "getcwdb": lambda: os.fsencode(self._tree.working_directory()),
            "link": self._link,
            "listdir": self._listdir,
            "lstat": self._lstat,
            "open": self._open,
            "remove": self._unlink,
            "rename": self._rename,
            "replace": self._rename,
            "rmdir": self._rmdir,
            "scandir": self._scandir,
            "symlink": self._symlink,
            "truncate": self._truncate,
            "unlink": self._unlink,
        }
        return {name: _reporting(function, 2 if name in OF_TWO_PATHS else 1) for name, function in functions.items()}

    # ---- Paths ----

    def path(self, path: Any, folder: int | None = None, *, follow: bool = True) -> str:
        """Returns the program's path for an argument, which is relative to `folder` if that is given."""
        text = os.fsdecode(path)
        if not text:
            raise os_error(errno.ENOENT, text)
        if folder is not None and not text.startswith("/"):
            text = f"{self._path_of(folder)}/{text}"
        return self._tree.resolve(text, follow=follow or text.endswith("/"))

    def _path_of(self, descriptor: int) -> str:
        return self._tree.program_path(_readlink(f"/proc/self/fd/{descriptor}"))

    # ---- Reading ----

    def reading(self, original: Any, *, follows: bool = True) -> Function:
        """Returns a function whose first argument is a path to read, or a descriptor."""

        def read(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int) or path is None:
                return original(path, *args, **kwargs)
            found = self.path(path, dir_fd, follow=follows and kwargs.get("follow_symlinks", True))
            return original(self._tree.place(found), *args, **kwargs)

        return read

    def _access(self, path: Any, mode: int, *, dir_fd: int | None = None, **kwargs: Any) -> bool:
        try:
            found = self.path(path, dir_fd, follow=kwargs.get("follow_symlinks", True))
        except OSError:
            return False
        return _access(self._tree.place(found), mode, **kwargs)

    def _lstat(self, path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        return _lstat(self._tree.place(self.path(path, dir_fd, follow=False)))

    def _listdir(self, path: Any = None) -> list[Any]:
        names = self._tree.names_in(self._folder(path))
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scandir(self, path: Any = None) -> Any:
        folder = self._folder(path)
        has_path = path is not None and not isinstance(path, int)
        if not isinstance(path, int) and self._tree.is_as_before(folder) and self._tree.place(folder) == folder:
            return _scandir(path if has_path else ".")
        names = self._listdir(path)
        shown = os.fspath(path) if has_path else ""

        def entry(name: Any) -> _Entry:
            return _Entry(
                name, os.path.join(shown, name) if shown else name, f"{folder.rstrip('/')}/{os.fsdecode(name)}"
            )

        return _Scan(map(entry, names))

    def _folder(self, path: Any) -> str:
        return self._path_of(path) if isinstance(path, int) else self.path("." if path is None else path)

    # ---- Opening ----

    def open_file(self, original: Function) -> Function:
        """Returns `open()`."""

        def opening(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            opener = kwargs.get("opener", args[5] if len(args) > 5 else None)
            if isinstance(file, int) or opener is not None:
                return original(file, mode, *args, **kwargs)
            path = self.path(file, follow="x" not in mode)
            if not any(letter in mode for letter in "wax+"):
                opened = original(self._tree.place(path), mode, *args, **kwargs)
            else:
                self._check_exclusive(path, "x" in mode)
                opened = original(self._to_open(path, keep="w" not in mode), mode, *args, **kwargs)
            return _named(opened, file)

        return opening

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        is_exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        found = self.path(path, dir_fd, follow=not (is_exclusive or flags & getattr(os, "O_NOFOLLOW", 0)))
        if not flags & CHANGES or self._tree.is_folder(found):
            return _open(self._tree.place(found), flags, mode)
        self._check_exclusive(found, bool(is_exclusive))
        return _open(self._to_open(found, keep=not flags & os.O_TRUNC, makes=bool(flags & os.O_CREAT)), flags, mode)

    def _to_open(self, path: str, *, keep: bool, makes: bool = True) -> str:
        return self._tree.to_write(path, keep=keep) if makes or self._tree.exists(path) else self._tree.place(path)

    def _check_exclusive(self, path: str, is_exclusive: bool) -> None:
        if is_exclusive and self._tree.exists(path):
            raise os_error(errno.EEXIST, path)

    # ---- Changing ----

    def _changing(self, original: Any, *, follows: bool) -> Function:
        def change(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            if isinstance(path, int):
                return original(path, *args, **kwargs)
            found = self.path(path, dir_fd, follow=follows and kwargs.get("follow_symlinks", True))
            return original(self._to_open(found, keep=True, makes=False), *args, **kwargs)

        return change

    def _making(self, original: Any) -> Function:
        def make(path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
            found = self.path(path, dir_fd, follow=False)
            self._check_exclusive(found, is_exclusive=True)
            return original(self._tree.to_write(found, keep=False), *args, **kwargs)

        return make

    def _truncate(self, path: Any, length: int) -> None:
        _truncate(path if isinstance(path, int) else self._to_open(self.path(path), keep=True, makes=False), length)

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._tree.remove(self.path(path, dir_fd, follow=False))

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._tree.remove_folder(self.path(path, dir_fd, follow=False))

    def _rename(self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        self._tree.rename(self.path(src, src_dir_fd, follow=False), self.path(dst, dst_dir_fd, follow=False))

    # Linux does not follow a link here, whatever is said.
    def _link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        follow_symlinks: bool = True,
    ) -> None:
        source = self.path(src, src_dir_fd, follow=False)
        _lstat(self._tree.place(source))  # raises if there is nothing
        target = self.path(dst, dst_dir_fd, follow=False)
        self._check_exclusive(target, is_exclusive=True)
        _link(self._tree.to_write(source, keep=True), self._tree.to_write(target, keep=False))

    def _symlink(self, src: Any, dst: Any, target_is_directory: bool = False, *, dir_fd: int | None = None) -> None:
        path = self.path(dst, dir_fd, follow=False)
        self._check_exclusive(path, is_exclusive=True)
        _symlink(os.fsdecode(src), self._tree.to_write(path, keep=False))

    def _chdir(self, path: Any) -> None:
        _chdir(path if isinstance(path, int) else self._tree.place(self.path(path)))


class _Entry:
    """What `os.scandir()` returns of a file, as `os.DirEntry`."""

    def __init__(self, name: Any, path: Any, full_path: str) -> None:
        self.name = name
        self.path = path
        self._full_path = full_path

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._full_path) if follow_symlinks else os.lstat(self._full_path)

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, follow_symlinks=False)

    def is_junction(self) -> bool:
        return False

    def _is(self, kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False


class _Scan:
    """The iterator that `os.scandir()` returns."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> _Scan:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Scan:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries = iter(())


def _named(opened: Any, file: Any) -> Any:
    """Gives a file the name by which the program has opened it."""
    inner = opened
    while not isinstance(inner, io.FileIO):
        inner = inner.buffer if isinstance(inner, io.TextIOWrapper) else inner.raw
    inner.name = file
    return opened


class _Finder:
    """Finds modules that the program has written where it imports them."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        from importlib.machinery import PathFinder

        folders = [folder for folder in (sys.path if path is None else path) if isinstance(folder, str)]
        written = [self._tree.written + self._tree.resolve(folder or ".") for folder in folders]
        written = [folder for folder in written if exists_at(folder)]
        return PathFinder.find_spec(name, written, target) if written else None


def _let_imports_find(tree: Tree) -> None:
    sys.meta_path.append(_Finder(tree))


# The functions of `os` as they were.
_access = os.access
_chdir = os.chdir
_link = os.link
_lstat = os.lstat
_open = os.open
_readlink = os.readlink
_scandir = os.scandir
_symlink = os.symlink
_truncate = os.truncate
