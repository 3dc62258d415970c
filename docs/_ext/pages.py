"""Titles and descriptions of pages: the first heading, and the first sentence below it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["DOCS", "SECTIONS", "Page", "page_at", "pages_of"]

DOCS = Path(__file__).resolve().parents[1]
SECTIONS = ("tutorials", "how_to", "reference", "explanation", "developers")


class Page(NamedTuple):
    """A page of the site."""

    docname: str
    title: str
    description: str


def page_at(path: Path) -> Page:
    """Return the page whose source is `path`. A page that includes a file has the description of that file."""
    text = path.read_text()
    included = re.match(r"```\{include\} (\S+)", text)
    if included:
        text = (path.parent / included[1]).read_text()
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.S)
    title, _, rest = text.lstrip().removeprefix("# ").partition("\n")
    paragraph = " ".join(rest.strip().split("\n\n")[0].split())
    is_prose = re.match(r"[\w`\"'(\[*]", paragraph) and not paragraph.startswith("```")
    sentence = re.split(r"(?<=[.?!:]) (?=[A-Z`])", paragraph)[0] if is_prose else ""
    docname = path.relative_to(DOCS).with_suffix("").as_posix()
    return Page(docname, title.strip(), _without_links(sentence).rstrip(":"))


def _without_links(text: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def pages_of(section: str) -> list[Page]:
    """Return the pages that the toctree of `section` has, in that order, without pages of folders in it."""
    folder = DOCS / section
    toctree = re.search(r"```\{toctree\}\n(.*?)```", (folder / "index.md").read_text(), re.S)
    assert toctree, f"{section}/index.md has no toctree"
    paths: dict[Path, None] = {}
    for line in toctree[1].splitlines():
        if line and not line.startswith(":"):
            found = sorted(folder.glob(f"{line}.md"))
            paths.update(dict.fromkeys(path for path in found if path.name != "index.md" or "/" in line))
    return [page_at(path) for path in paths]
