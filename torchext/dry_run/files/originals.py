"""The original functions of `os`, and tools that the replacements share.

The overlay must reach the real files, so its code calls `real.stat()` and not `os.stat()`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["about_refusal", "can_write", "os_error", "path_of", "real", "reopen", "reopen_readers", "when_imported"]

# `os` takes its functions from a C module with the name of the system: `posix` or `nt`.
real: Any = SimpleNamespace(**vars(importlib.import_module(os.name)))


def os_error(code: int, path: str, target: str | None = None) -> OSError:
    """Return the error for a system error code, of Python's class for it."""
    return OSError(code, os.strerror(code), path, None, target)


# ---- Call a function with a module when it is imported


_actions: dict[str, Callable[[Any], None]] = {}


def when_imported(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with the module `name`: now if it has been imported, otherwise at the end of its import."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder:
    """Finds modules with the other finders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _actions:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                _act_after(spec.loader, _actions[name])
                return spec
        return None


def _act_after(loader: Any, action: Callable[[Any], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        execute(module)
        action(module)

    loader.exec_module = exec_module


_finder: Any = _Finder()


# ---- Advice about writes that the system has rejected: `guard.py`


# The messages of C, Rust, SQLite and HDF5.
REFUSED = re.compile(
    r"permission denied|os error 13|errno(?: =)? 13|unable to open database|readonly database", re.IGNORECASE
)

ADVICE = """
A dry run rejects writes of code in C, C++ or Rust that opens files by name, because they would change real files. Let
the program write below `tempfile.gettempdir()`, or give the library a file that Python has opened. See "Files" in
docs/how_to/dry_runs.md.
"""


def about_refusal(error: BaseException | None) -> str:
    """Return advice if an error, or one of its causes, is that of a rejected write; otherwise an empty string."""
    while error is not None:
        if REFUSED.search(str(error)):
            return ADVICE
        error = error.__cause__ or error.__context__
    return ""


# ---- Descriptors of open files, as Linux lists them in `/proc`


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
