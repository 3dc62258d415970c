"""The files of a dry run: what a program writes is kept apart, and nothing that was there before it changes.

There are two layers. `functions.py` and `libraries.py` replace the functions of Python that name files, so that a
program finds in their places what it has written (`tree.py`). `guard.py` has the system refuse every other write, of
code in C as of other programs that the program starts.

The processes of a dry run import this package when Python starts, before the modules that keep functions of `os` for
themselves: `startup/sitecustomize.py`. So it imports Python's own library only.
"""

from __future__ import annotations

import os

from .functions import install
from .guard import can_guard
from .tree import Change, Tree, active

__all__ = ["GUARD", "STARTUP", "Change", "Tree", "active", "can_guard", "install"]

# By `os`, because `pathlib` may not have been imported when Python starts.
_HERE = os.path.dirname(os.path.abspath(__file__))

# The program that starts another one, guarded.
GUARD = f"{_HERE}/guard.py"

# What has to be on the path of Python so that a process keeps its files apart.
STARTUP = f"{_HERE}/startup"
