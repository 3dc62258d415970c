"""Write the lists of pages in the index of each section of docs/; `--check` only compares.

The order is that of the toctree; the words are the first sentence of each page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from pages import DOCS, SECTIONS, pages_of

BEGIN, END = "<!-- pages, written by docs/sections.py -->\n", "<!-- end of pages -->"


def index_of(section: str) -> str:
    """Return the text of the index of `section` with the list of its pages."""
    text = (DOCS / section / "index.md").read_text()
    items = []
    for page in pages_of(section):
        words = f": {page.description}" if page.description else ""
        items.append(f"- [{page.title}]({page.docname.removeprefix(f'{section}/')}.md){words}\n")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: BEGIN + "".join(items) + END, text, flags=re.S)


def main() -> None:
    """Write or check."""
    for section in SECTIONS:
        index = DOCS / section / "index.md"
        if "--check" not in sys.argv:
            index.write_text(index_of(section))
        elif index.read_text() != index_of(section):
            sys.exit(f"docs/{section}/index.md is not up to date: run `python docs/sections.py`")


if __name__ == "__main__":
    main()
