"""Reads the source line that a text names, without importing PyTorch."""

from __future__ import annotations

import linecache
import re
from typing import NamedTuple

__all__ = ["SourceLine", "code_at", "source_line"]


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
