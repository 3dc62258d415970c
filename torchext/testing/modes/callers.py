"""Whose code it is that calls."""

from __future__ import annotations

import sys

__all__ = ["is_called_by_tests"]


def is_called_by_tests() -> bool:
    """Returns true if the calling function is called by code other than PyTorch's own, or by its helpers for tests."""
    name = str(sys._getframe(2).f_globals.get("__name__"))
    return not f"{name}.".startswith("torch.") or name.startswith("torch.testing.")
