"""Replace Python functions in every module that refers to them.

The C modules from which `os` and `io` take their functions are changed as well. So Python's importer, which calls
these, finds modules that the program has written, and a function is pickled under the name of the original.
"""

from __future__ import annotations

import _io
import importlib
import os
import sys
from types import FunctionType
from typing import Any

from .functions import Function, Replacements, reporting
from .imports import when_imported
from .originals import real

__all__ = ["name_as", "replace_functions"]


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
