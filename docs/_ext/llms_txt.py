"""Write llms.txt at the root of the site: all pages with their descriptions, and the public API.

The format is that of llmstxt.org. The table of the API is docs/reference/api_table.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pages import DOCS, SECTIONS, page_at, pages_of
from sphinx.application import Sphinx

__all__ = ["setup", "text"]

TITLES = {"tutorials": "Tutorials", "how_to": "How-to guides", "developers": "Developers"}


def text() -> str:
    """Return the text of the file."""
    index = page_at(DOCS / "index.md")
    lines = [f"# {index.title}", "", f"> {index.description}"]
    for section in SECTIONS:
        lines += ["", f"## {TITLES.get(section, section.capitalize())}", ""]
        for docname, title, description in pages_of(section):
            lines.append(f"- [{title}]({docname}.html)" + (f": {description}" if description else ""))
    table = DOCS / "reference" / "api_table.md"
    if table.exists():
        _, _, modules = table.read_text().partition("\n## ")
        lines += ["", "## Public API", "", "### " + modules.strip().replace("\n## ", "\n### ")]
    return "\n".join(lines) + "\n"


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "llms.txt").write_text(text())


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the file when the pages have been written."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
