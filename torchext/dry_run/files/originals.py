"""The original system functions, before `replacing.py` replaces them.

The overlay must reach the real files, so its code calls `real.stat()` and not `os.stat()`.
"""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

__all__ = ["os_error", "real"]

# `os` takes its functions from a C module with the name of the system: `posix` or `nt`.
real: Any = SimpleNamespace(**vars(importlib.import_module(os.name)))


def os_error(code: int, path: str, target: str | None = None) -> OSError:
    """Return the error for a system error code, of Python's class for it."""
    return OSError(code, os.strerror(code), path, None, target)
