"""The files of a dry run: written files are kept apart, and existing files never change.

Two layers enforce this. Python functions that take file names are replaced (`functions.py`), so that a program finds
its written files under their names (`tree.py`, `overlay.py`). `guard.py` makes the system reject all other writes, of
code in C and of programs that the program starts.

The processes of a dry run import this package when Python starts, before modules that keep references to functions of
`os`: `startup/sitecustomize.py`. So it imports only the standard library.
"""

from __future__ import annotations

import os
import sys

from .functions import Replacements, replace_functions
from .libraries import redirect_databases, redirect_libraries
from .originals import when_imported
from .overlay import PLACEHOLDER, Change, Overlay, activate, active, changes_in, keep_files
from .processes import FILES, STARTUP, child_environment, child_functions, redirect_processes, run_again_if_written

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


def install(folder: str) -> None:
    """Keep the files of this process in `folder` until it ends."""
    sys.dont_write_bytecode = True  # also with options that make Python ignore its environment
    overlay = Overlay(folder)
    activate(overlay)
    replacements = Replacements(overlay)
    replace_functions(replacements, child_functions(overlay, replacements))
    redirect_libraries(overlay)
    redirect_databases(overlay)
    redirect_processes(overlay, replacements)
    run_again_if_written()
