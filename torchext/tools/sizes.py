"""Sizes as people write them."""

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
    """Returns `size` in bytes.

    Args:
        size: A number of bytes, or a number with a unit: `"5GB"` are 5 · 10⁹ bytes, as for huggingface_hub, and
            `"1GiB"` are 2³⁰.
        name: The parameter that it was given for, for the error.

    Raises:
        TypeError: It is neither a number nor a string.
        ValueError: It is not a size, or not larger than 0.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f"`{name}` takes bytes, or a size such as '5GB' or '1GiB', but it is a {type(size).__name__}.")
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"`{name}` takes a size such as '5GB' or '1GiB', but it is {size!r}.")
    nbytes = int(float(found[1]) * UNITS[found[2].upper()]) if found[2] else int(float(found[1]))
    if nbytes < 1:
        raise ValueError(f"`{name}` has to be larger than 0, but it is {size!r}.")
    return nbytes


def readable(nbytes: int) -> str:
    """Returns a size in the largest unit of which it has at least one."""
    size, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
