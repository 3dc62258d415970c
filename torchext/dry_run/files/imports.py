"""Call a function with a module when it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

__all__ = ["when_imported"]

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
