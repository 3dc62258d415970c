"""What is done at most once in a process, on whichever thread it is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps

__all__ = ["once"]


def once(function: Callable[[], None]) -> Callable[[], None]:
    """Returns a function that calls `function` the first time only. Other threads wait until that is done.

    If it fails, the next call tries again.
    """
    lock = threading.RLock()
    is_done = False

    @wraps(function)
    def run() -> None:
        nonlocal is_done
        if is_done:
            return
        with lock:
            if not is_done:
                function()
                is_done = True

    return run
