"""Whose code it is that calls."""

from __future__ import annotations

import sys

__all__ = ["is_called_by_tests"]


def is_called_by_tests() -> bool:
    """Is the function that asks called by other code than PyTorch's own? What helps PyTorch's tests is not its own."""
    name = str(sys._getframe(2).f_globals.get("__name__"))
    return not f"{name}.".startswith("torch.") or name.startswith("torch.testing.")
