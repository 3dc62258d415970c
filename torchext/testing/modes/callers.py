"""Identifies the caller of a function."""

from __future__ import annotations

import sys

__all__ = ["is_called_by_tests"]


def is_called_by_tests() -> bool:
    """Return true if the calling function was called from outside PyTorch, or by PyTorch's test helpers."""
    name = str(sys._getframe(2).f_globals.get("__name__"))
    return not f"{name}.".startswith("torch.") or name.startswith("torch.testing.")
