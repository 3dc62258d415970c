"""Tells libraries whose code in C or Rust opens files by name where the files of a dry run are."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from .tree import Tree

__all__ = ["tell_libraries"]


class _Opener(NamedTuple):
    """A function that opens a file.

    Attributes:
        name: Its name in its module.
        argument: The name of the argument that is a path, or else no path.
        writes: Whether it writes the file.
        keeps: Whether it then keeps what is in it.
    """

    name: str
    argument: str
    writes: bool = False
    keeps: bool = False


OPENERS: dict[str, tuple[_Opener, ...]] = {
    "torch.serialization": (_Opener("load", "f"), _Opener("save", "f", writes=True)),
    "safetensors": (_Opener("safe_open", "filename"), _Opener("serialize_file", "filename", writes=True)),
    "sqlite3": (_Opener("connect", "database", writes=True, keeps=True),),
}

# Where a signature cannot be asked for.
POSITIONS = {"safe_open": 0, "serialize_file": 1, "connect": 0}


def tell_libraries(tree: Tree) -> None:
    """Replaces the functions in `OPENERS` when their modules are imported."""
    for name, module in list(sys.modules.items()):
        if name in OPENERS:
            _tell(module, tree)
    sys.meta_path.insert(0, _Importer(tree))


def _tell(module: Any, tree: Tree) -> None:
    for opener in OPENERS[module.__name__]:
        original = getattr(module, opener.name, None)
        if original is not None:
            setattr(module, opener.name, _opening(original, opener, tree))


def _opening(original: Callable[..., Any], opener: _Opener, tree: Tree) -> Callable[..., Any]:
    position = _position_of(original, opener)

    def placed(path: Any) -> Any:
        if not isinstance(path, (str, bytes, os.PathLike)) or os.fsdecode(path).startswith((":", "file:")):
            return path
        found = tree.resolve(os.fsdecode(path))
        return tree.to_write(found, keep=opener.keeps) if opener.writes else tree.place(found)

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if opener.argument in kwargs:
            kwargs[opener.argument] = placed(kwargs[opener.argument])
        elif len(args) > position:
            args = (*args[:position], placed(args[position]), *args[position + 1 :])
        return original(*args, **kwargs)

    return call


def _position_of(function: Callable[..., Any], opener: _Opener) -> int:
    if opener.name in POSITIONS:
        return POSITIONS[opener.name]
    return list(inspect.signature(function).parameters).index(opener.argument)


class _Importer:
    """Finds the modules in `OPENERS` as others do, and tells them when they have been imported."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._is_asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in OPENERS or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _tell(module, self._tree)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
