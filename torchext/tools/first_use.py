"""Packages that import their public names at the first use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["names_from"]


def names_from(package: str, *homes: str) -> Callable[[str], Any]:
    """Return the `__getattr__` (PEP 562) of a package whose modules are used without its public names.

    Args:
        package: The name of the package.
        homes: The modules that define the names in its `__all__`.
    """

    def find(name: str) -> Any:
        if name in sys.modules[package].__all__:
            for home in homes:
                module = import_module(f".{home}", package)
                if name in module.__all__:
                    setattr(sys.modules[package], name, found := getattr(module, name))
                    return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
