"""The names in a folder, as `os.scandir()` returns them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Entry", "Scan"]


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
