"""The version of torchext, and the releases of torch that it supports. setup.py and the CMake package read it, too."""

from __future__ import annotations

__all__ = ["NEWEST_TORCH", "OLDEST_TORCH", "__version__"]

__version__ = "0.1.0"

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)
