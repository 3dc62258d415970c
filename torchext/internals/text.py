"""Results as plain values, and sizes, source lines and progress bars as text."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

__all__ = [
    "SourceLine",
    "bytes_of",
    "code_at",
    "in_units",
    "plain",
    "progress_bar",
    "source_line",
]


def plain(value: Any) -> Any:
    """Return `value` as values that `json.dumps()` takes.

    Dataclasses and mappings become dicts, other iterables lists, enums their names in lower case, and objects with a
    method `to_dict()` its result. Everything else becomes a string.
    """
    if isinstance(value, Enum):
        return value.name.lower()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [plain(item) for item in value]
    return str(value)


# ---- Sizes


UNITS: dict[str, int] = {
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


def in_units(nbytes: int) -> str:
    """Return `nbytes` with a unit, such as `1.50 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


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
