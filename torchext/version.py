"""The version of torchext, and the supported releases of torch. setup.py and the CMake package also read this file."""

from __future__ import annotations

import os

__all__ = ["NEWEST_TORCH", "OLDEST_TORCH", "__version__", "is_supported"]

__version__ = "0.1.0"

OLDEST_TORCH = (2, 11)
NEWEST_TORCH = (2, 15)


def is_supported(torch_release: tuple[int, ...]) -> bool:
    """Returns true if torchext was tested with a release, or is to take it for one that works."""
    accepts_newer = os.environ.get("TORCHEXT_ACCEPT_UNVERIFIED_TORCH") == "1"
    return torch_release >= OLDEST_TORCH and (torch_release <= NEWEST_TORCH or accepts_newer)
