"""The files of a dry run: what a program writes is kept apart, and nothing that was there before it changes.

There are two layers. Functions of Python that name files are replaced (`replacing.py`), so that a program finds in
their places what it has written (`tree.py`, `overlay.py`). `guard.py` has the system refuse every other write, of code
in C as of other programs that the program starts.

The processes of a dry run import this package when Python starts, before the modules that keep functions of `os` for
themselves: `startup/sitecustomize.py`. So it imports Python's own library only.
"""

from __future__ import annotations

import os

from .changes import PLACEHOLDER, Change, changes_in, keep_files
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
]

# The program that starts another one, guarded. By `os`, because `pathlib` may not have been imported yet.
GUARD = f"{os.path.dirname(os.path.abspath(__file__))}/guard.py"
