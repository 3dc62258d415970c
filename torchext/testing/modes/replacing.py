"""Putting something in place of something else, under all names that it has."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["replace_everywhere"]


def replace_everywhere(original: object, replacement: object) -> None:
    """Lets every name in a module that has been imported, and every attribute of `torch._C` mean `replacement`."""
    for module in list(sys.modules.values()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if str(names.get("__name__")).partition(".")[0] != "torchext":
            for name in [name for name, value in list(names.items()) if value is original]:
                setattr(module, name, replacement)
