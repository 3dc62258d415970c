"""The version of torchext, which setup.py and the CMake package read, too."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
