"""The version of torchext, and the supported releases of torch. setup.py and the CMake package also read this file."""

from __future__ import annotations

import os

__all__ = ["NEWEST_TORCH", "OLDEST_TORCH", "TRITON", "__version__", "is_supported"]

__version__ = "0.1.0"

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)

TRITON = {(2, 11): "3.6", (2, 12): "3.7", (2, 13): "3.7", (2, 14): "3.8", (2, 15): "3.9"}
"""The release of Triton that each release of torch expects."""


def is_supported(torch_release: tuple[int, ...]) -> bool:
    """Returns true if torchext was tested with a release, or is to take it for one that works."""
    accepts_newer = os.environ.get("TORCHEXT_ACCEPT_UNVERIFIED_TORCH") == "1"
    return torch_release >= OLDEST_TORCH and (torch_release <= NEWEST_TORCH or accepts_newer)
