"""The system's functions as they are before `replacing.py` replaces them.

The overlay itself must reach the real files, so its code calls `real.stat()` and not `os.stat()`.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

__all__ = ["os_error", "real"]

# `os` takes its functions from a module written in C, which has the name of the system: `posix` or `nt`.
real: Any = SimpleNamespace(**vars(importlib.import_module(os.name)))


def os_error(code: int, path: str, target: str | None = None) -> OSError:
    """Return the error that the system raises with this code, of the class that Python has for it."""
    return OSError(code, os.strerror(code), path, None, target)
