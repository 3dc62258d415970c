"""Parses and formats sizes."""

from __future__ import annotations

import re

__all__ = ["bytes_of", "readable"]

UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


def bytes_of(size: int | str, name: str) -> int:
    """Return `size` in bytes.

    Args:
        size: A number of bytes, or a number with a unit: `"5GB"` is 5 · 10⁹ bytes, as in huggingface_hub, and `"1GiB"`
            is 2³⁰ bytes.
        name: The name of the parameter, for errors.

    Raises:
        TypeError: `size` is neither a number nor a string.
        ValueError: `size` cannot be parsed or is not positive.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(
            f"`{name}` expects a number of bytes or a size such as '5GB' or '1GiB', got {type(size).__name__}."
        )
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"`{name}` expects a size such as '5GB' or '1GiB', got {size!r}.")
    nbytes = int(float(found[1]) * UNITS[found[2].upper()]) if found[2] else int(float(found[1]))
    if nbytes < 1:
        raise ValueError(f"`{name}` must be larger than 0, got {size!r}.")
    return nbytes


def readable(nbytes: int) -> str:
    """Return a size in the largest unit that gives a number of at least 1."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
