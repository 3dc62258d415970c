"""Functions that run at most once in a process, on the thread that calls them first."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from .patching import patching_lock

__all__ = ["once"]


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls `function` the first time only. Other threads wait until that call is done.

    If it fails, the next call tries again. Recursive calls do nothing.
    """
    is_done = is_running = False

    @wraps(function)
    def run() -> None:
        nonlocal is_done, is_running
        if is_done:
            return
        with patching_lock:  # most of these functions declare patches
            if is_done or is_running:
                return
            is_running = True
            try:
                function()
                is_done = True
            finally:
                is_running = False

    return run
