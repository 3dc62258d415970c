"""The end of each script that writes a page of this folder."""

from __future__ import annotations

import sys
from pathlib import Path


def write_or_check(page: Path, text: str) -> None:
    """Write `text` to `page`; with `--check` on the command line, exit with an error if the page differs."""
    if "--check" not in sys.argv:
        page.write_text(text)
    elif page.read_text() != text:
        script = Path("docs", "reference", page.name).with_suffix(".py")
        sys.exit(f"{page.name} is not up to date: run `python {script}`")
