"""Replaces an object under all of its names."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["replace_everywhere"]


def replace_everywhere(original: object, replacement: object) -> None:
    """Replace the object in all imported modules and in the attributes of `torch._C`."""
    for module in list(sys.modules.values()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        if str(names.get("__name__")).partition(".")[0] != "torchext":
            for name in [name for name, value in list(names.items()) if value is original]:
                setattr(module, name, replacement)
