"""Advice about writes that the system has rejected: `guard.py`."""

from __future__ import annotations

import re

__all__ = ["about_refusal"]

# The messages of C, Rust, SQLite and HDF5.
REFUSED = re.compile(
    r"permission denied|os error 13|errno(?: =)? 13|unable to open database|readonly database", re.IGNORECASE
)

ADVICE = """
A dry run rejects writes of code in C, C++ or Rust that opens files by name, because they would change real files. Let
the program write below `tempfile.gettempdir()`, or give the library a file that Python has opened. See "Files" in
docs/how_to/dry_runs.md.
"""


def about_refusal(error: BaseException | None) -> str:
    """Return advice if an error, or one of its causes, is that of a rejected write; otherwise an empty string."""
    while error is not None:
        if REFUSED.search(str(error)):
            return ADVICE
        error = error.__cause__ or error.__context__
    return ""
