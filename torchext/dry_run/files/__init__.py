"""The files of a dry run: written files are kept apart, and existing files never change.

Two layers enforce this. Python functions that take file names are replaced (`replacing.py`), so that a program finds
its written files under their names (`tree.py`, `overlay.py`). `guard.py` makes the system reject all other writes, of
code in C and of programs that the program starts.

The processes of a dry run import this package when Python starts, before modules that keep references to functions of
`os`: `startup/sitecustomize.py`. So it imports only the standard library.
"""

from __future__ import annotations

import os

from .changes import PLACEHOLDER, Change, changes_in, keep_files
from .imports import when_imported
from .installing import install
from .overlay import Overlay, active
from .processes import FILES, STARTUP, child_environment

__all__ = [
    "FILES",
    "GUARD",
    "PLACEHOLDER",
    "STARTUP",
    "Change",
    "Overlay",
    "active",
    "changes_in",
    "child_environment",
    "install",
    "keep_files",
    "when_imported",
]

# The program that starts another one under guard. Uses `os`, because importing `pathlib` here may be too early.
GUARD = f"{os.path.dirname(os.path.abspath(__file__))}/guard.py"
