"""Imports at the first use, and calls of functions when a module has been imported."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["is_imported", "names_from", "when_imported"]


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` once, after the module is imported: immediately if it has been imported, else on import.

    Args:
        name: The full name of the module.
        act: Called by the importing thread, which other threads may wait for. If a thread is importing the module now,
            called by a new thread soon afterwards.
    """
    waiting = _actions.setdefault(name, [])
    waiting.append(act)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    is_known = name in sys.modules or name in _bootstrap._module_locks  # of modules that a thread is importing
    if not is_known or not _taken_back(act, waiting):
        return  # the import calls it
    if is_imported(name):
        act()
    else:
        threading.Thread(target=_wait, args=(name, act), name=f"torchext: wait for {name}", daemon=True).start()


def _taken_back(act: Callable[[], None], waiting: list[Callable[[], None]]) -> bool:
    try:
        waiting.remove(act)
    except ValueError:  # an import on another thread has called it
        return False
    return True


def _wait(name: str, act: Callable[[], None]) -> None:
    _bootstrap._lock_unlock_module(name)  # waits until the import has succeeded or failed
    when_imported(name, act)


def is_imported(name: str) -> bool:
    """Return true if the module has been imported. While a thread runs its code, some of its attributes are missing."""
    module = sys.modules.get(name)
    return module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False) is not True


def names_from(package: str, *homes: str) -> Callable[[str], Any]:
    """Return the `__getattr__` (PEP 562) of a package, whose public names are imported at their first use.

    Args:
        package: The name of the package.
        homes: The modules that define the names in its `__all__`, relative to the package.
    """

    def find(name: str) -> Any:
        if name not in sys.modules[package].__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        modules = (import_module(f".{home}", package) for home in homes)
        found = next(getattr(module, name) for module in modules if name in module.__all__)
        setattr(sys.modules[package], name, found)
        return found

    return find


_bootstrap: Any = importlib._bootstrap  # has no public way to wait for an import
_actions: dict[str, list[Callable[[], None]]] = {}


class _Finder(MetaPathFinder):
    """Finds the modules with actions through the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _actions.get(fullname):
            return None
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in after)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_finder = _Finder()


class _Loader(Loader):
    """Loads a module like `original`, and then calls its actions."""

    def __init__(self, original: Loader) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:  # such as `get_code()`, which `runpy` calls
        return getattr(self._original, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        waiting = _actions.get(module.__name__, [])
        while waiting:
            waiting.pop(0)()
