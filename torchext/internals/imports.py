"""Imports at the first use, and calls of functions when a module has been imported: during a block, or at any time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["names_from", "once_imported", "patch_imported", "patching", "when_imported"]

_patched: set[tuple[str, int, Callable[[ModuleType], None]]] = set()


@contextmanager
def once_imported(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` after the module is imported, if that happens in the block. Earlier imports do not count.

    Args:
        name: The full name of the module.
        act: Called by the importing thread.
    """
    if name in sys.modules:
        yield
        return
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def patch_imported(name: str, needs: Sequence[str], patch: Callable[[ModuleType], None]) -> None:
    """Call `patch` with a module if it has been imported, once per process.

    Several features may patch the same module, each with its own `patch`.

    Args:
        name: The full name of the module.
        needs: Attributes that the module must have. They are missing while another thread imports it, and in some
            releases.
        patch: Declares patches.
    """
    module = sys.modules.get(name)
    key = name, id(module), patch
    if module is not None and all(hasattr(module, need) for need in needs) and key not in _patched:
        _patched.add(key)
        patch(module)


@contextmanager
def patching(name: str, needs: Sequence[str], patch: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call `patch_imported()` for a module that is imported before or in the block. The patches outlast the block."""
    act = partial(patch_imported, name, needs, patch)
    act()
    with once_imported(name, act):
        yield


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call `act` after the module is imported: immediately if it has been imported, else on import.

    Args:
        name: The full name of the module.
        act: Called once, by the importing thread.
    """
    if name in sys.modules:
        act()
        return

    def act_once() -> None:
        sys.meta_path.remove(finder)
        act()

    finder = _Finder(name, act_once)
    sys.meta_path.insert(0, finder)


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


class _Finder(MetaPathFinder):
    """Finds one module through the other finders."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        after = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in after)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(Loader):
    """Loads a module like `original`, and then calls the action."""

    def __init__(self, original: Loader, act: Callable[[], None]) -> None:
        self._original = original
        self._act = act

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        module.__loader__ = self._original
        self._original.exec_module(module)
        self._act()
