"""Where the sources are, which releases of PyTorch they are for, and what the environment asks for."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)


def is_set(variable: str) -> bool:
    """Tells whether a variable of the environment is something else than 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def torch_release(version: str) -> tuple[int, ...]:
    """Returns the major and the minor version."""
    return tuple(int(part) for part in version.split(".")[:2])


def named(release: tuple[int, ...]) -> str:
    """Returns a release as PyTorch writes it."""
    return ".".join(map(str, release))
