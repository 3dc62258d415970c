"""Acts as soon as a module has been imported: while a block lasts, or whenever that is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["once_imported", "patching", "when_imported"]

_patched: set[tuple[str, int, Callable[[ModuleType], None]]] = set()


@contextmanager
def once_imported(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` when the module has run, if it is imported in the block; not if that was before.

    Args:
        name: Of the module, with its packages.
        act: Called by the thread that imports it.
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


@contextmanager
def patching(name: str, needs: Sequence[str], patch: Callable[[ModuleType], None]) -> Iterator[None]:
    """Calls `patch` with a module that may have been imported before the block or is imported in it, once in a process.

    Each `patch` is called once, so several features may patch the same module.

    Args:
        name: Of the module, with its packages.
        needs: What the module must have. Another thread may be importing it, or another release have none.
        patch: Declares patches that outlast the block.
    """

    def act() -> None:
        module = sys.modules.get(name)
        key = name, id(module), patch
        if module is not None and all(hasattr(module, need) for need in needs) and key not in _patched:
            _patched.add(key)
            patch(module)

    act()
    with once_imported(name, act):
        yield


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Calls `act` when the module has run: now, if it has been imported, or else when it is.

    Args:
        name: Of the module, with its packages.
        act: Called once, by the thread that imports it.
    """
    if name in sys.modules:
        act()
        return

    def act_once() -> None:
        sys.meta_path.remove(finder)
        act()

    finder = _Finder(name, act_once)
    sys.meta_path.insert(0, finder)


class _Finder(MetaPathFinder):
    """Finds one module where the other finders find it."""

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
    """Loads a module as `original` does, and acts."""

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
