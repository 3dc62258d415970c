"""Sizes, source lines and progress bars as text."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["SourceLine", "bytes_of", "code_at", "progress_bar", "readable", "source_line"]

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


# ---- Source lines


class SourceLine(NamedTuple):
    """The parts of the text `file:line in function`."""

    file: str
    number: int
    function: str


def source_line(place: str) -> SourceLine:
    """Return the parts of a result of `place_of()`; another text is a file without lines."""
    found = re.fullmatch(r"(.*):(\d+) in (.*)", place, re.DOTALL)
    return SourceLine(found[1], int(found[2]), found[3]) if found else SourceLine(place, 0, "")


def code_at(place: str) -> str:
    """Return the source code of a result of `place_of()`; empty if it cannot be read."""
    return linecache.getline(*source_line(place)[:2]).strip()


# ---- Progress bars


@contextmanager
def progress_bar(total: int, doing: str = "materializing") -> Iterator[Callable[[int], object]]:
    """Show a progress bar for `total` bytes, with the rate, while the block runs.

    Args:
        total: The number of bytes.
        doing: The label of the progress bar.

    Yields:
        A function that takes the number of further bytes.

    Raises:
        ImportError: tqdm is not installed.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("`progress=True` needs tqdm. Install it: pip install tqdm") from error
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield bar.update
