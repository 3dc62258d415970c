"""Install the files of a dry run in a process."""

from __future__ import annotations

import sys

from .databases import redirect_databases
from .functions import Replacements
from .libraries import redirect_libraries
from .overlay import Overlay, activate
from .processes import child_functions, redirect_processes, run_again_if_written
from .replacing import replace_functions

__all__ = ["install"]


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
