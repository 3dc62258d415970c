"""The folder of the sources, the supported releases of PyTorch, and settings from the environment."""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]

# The package's version module, read without importing the package, which needs torch.
_SAYS = runpy.run_path(str(ROOT / "torchext" / "version.py"))
VERSION: str = _SAYS["__version__"]
OLDEST_TORCH: tuple[int, int] = _SAYS["OLDEST_TORCH"]
NEWEST_TORCH: tuple[int, int] = _SAYS["NEWEST_TORCH"]
is_supported: Callable[[tuple[int, ...]], bool] = _SAYS["is_supported"]


def is_set(variable: str) -> bool:
    """Return true if an environment variable is set to anything but 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def minor_release(version: str) -> tuple[int, ...]:
    """Return the major and the minor version. `2.14.0a0+git5c1f` belongs to release 2.14."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version of torch")
    return int(found[1]), int(found[2])


def named(release: tuple[int, ...]) -> str:
    """Return a release as PyTorch writes it."""
    return ".".join(map(str, release))
