"""Let links of pages to files of the repository work in the site.

Pages link as they do on GitHub, by relative paths. In the site

- a link to a Markdown file that a page of the site includes, such as CONTRIBUTING.md, leads to that page. Links in
  that file are relative to its own folder, also where it is included;
- a link to another file, or to a folder, leads to a page of the site that displays it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

__all__ = ["setup"]

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SOURCES = "repository"  # where the pages that display files are, in the site


def _included() -> dict[Path, str]:
    """Return the pages that consist of a file from outside of docs/, by that file."""
    found = {ROOT / "README.md": "index"}
    for page in sorted((DOCS / "developers").glob("*.md")):
        for name in re.findall(r"^```\{include\} (\S+)", page.read_text(), re.M):
            found[(page.parent / name).resolve()] = page.relative_to(DOCS).with_suffix("").as_posix()
    return found


class RepositoryLinks(SphinxTransform):  # type: ignore[misc]
    """Turns links to files of the repository into links to pages of the site."""

    default_priority = 210

    def apply(self, **_: Any) -> None:
        included = _included()
        own = {page: path for path, page in included.items() if page != "index"}.get(self.env.docname)
        folder = (own or Path(self.env.doc2path(self.env.docname))).parent
        for node in list(self.document.findall(_is_link_to_a_path)):
            path_part, _, anchor = node["reftarget"].partition("#")
            path = Path(os.path.normpath(folder / path_part))
            anchor = anchor or node.get("reftargetid")
            if not path.exists():
                continue  # MyST reports it
            docname = included.get(path) or self._page_at(path)
            node.replace_self(self._to_page(node, docname, anchor) if docname else self._to_source(node, path))

    def _page_at(self, path: Path) -> str | None:
        if path.is_dir() and (path / "index.md").exists():
            path = path / "index.md"
        docname = path.relative_to(DOCS).with_suffix("").as_posix() if path.is_relative_to(DOCS) else None
        return docname if path.suffix == ".md" and docname in self.env.found_docs else None

    def _to_page(self, node: nodes.Element, docname: str, anchor: str | None) -> nodes.Element:
        link = addnodes.pending_xref(
            "",
            *node.children,
            refdomain="doc",
            refdoc=self.env.docname,
            reftype="myst",
            reftarget=docname,
            reftargetid=anchor or None,
            refexplicit=bool(node.get("refexplicit")),
        )
        link.source, link.line = node.source, node.line
        return link

    def _to_source(self, node: nodes.Element, path: Path) -> nodes.Element:
        name = path.relative_to(ROOT).as_posix()
        shown = self.env.__dict__.setdefault("repository_files", {})
        shown.setdefault(self.env.docname, set()).add(name)
        up = "../" * self.env.docname.count("/")
        return nodes.reference("", "", *node.children, refuri=f"{up}{SOURCES}/{name}.html", internal=True)


def _is_link_to_a_path(node: nodes.Node) -> bool:
    if not isinstance(node, addnodes.pending_xref | addnodes.download_reference) or node.get("reftype") != "myst":
        return False
    target = node["reftarget"]
    if isinstance(node, addnodes.pending_xref) and node.get("refdomain") == "doc":
        node["reftarget"] = target = f"{_from(node['refdoc'], target)}.md"
    return not target.startswith("#")


def _from(docname: str, target: str) -> str:
    return os.path.relpath(DOCS / target, (DOCS / docname).parent)


def _source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    shown: dict[str, set[str]] = getattr(app.env, "repository_files", {})
    for name in sorted({name for names in shown.values() for name in names}):
        path = ROOT / name
        body = _listing(path) if path.is_dir() else _highlighted(path)
        yield f"{SOURCES}/{name}", {"title": name, "body": f"<h1>{name}</h1>\n{body}"}, "page.html"


def _highlighted(path: Path) -> str:
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(path.read_text(), lexer, HtmlFormatter(cssclass="highlight")))


def _listing(path: Path) -> str:
    files = subprocess.run(["git", "ls-files", "."], cwd=path, capture_output=True, text=True, check=False).stdout
    return "<pre>" + files + "</pre>"


def _forget(_: Sphinx, env: Any, docname: str) -> None:
    getattr(env, "repository_files", {}).pop(docname, None)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the transform and the pages that display files."""
    app.add_transform(RepositoryLinks)
    app.connect("html-collect-pages", _source_pages)
    app.connect("env-purge-doc", _forget)
    return {"version": "1", "env_version": 1, "parallel_read_safe": False, "parallel_write_safe": True}
