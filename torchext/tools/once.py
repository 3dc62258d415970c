"""What is done at most once in a process, on whichever thread it is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps

__all__ = ["once"]


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `function` the first time only. Other threads wait until that is done.

    If it fails, the next call tries again. While it runs, calls by itself do nothing.
    """
    lock = threading.RLock()
    is_done = is_running = False

    @wraps(function)
    def run() -> None:
        nonlocal is_done, is_running
        if is_done:
            return
        with lock:
            if is_done or is_running:
                return
            is_running = True
            try:
                function()
                is_done = True
            finally:
                is_running = False

    return run
