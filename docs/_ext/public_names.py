"""Read the public API from `__all__`: a directive that documents it, and links to it in docstrings.

`.. public-api:: torchext.fake` describes a module, lists its public names with their summaries, then documents each. A
name that the module takes over from another public module is documented there.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyXRefRole
from sphinx.util.docutils import SphinxDirective, SphinxRole

__all__ = ["MODULES", "home_of", "public_names", "setup"]

# The public modules. A name in several of them is documented in the first.
MODULES = (
    *("torchext.errors", "torchext.deferred_init", "torchext.fake", "torchext.memory", "torchext.dry_run"),
    *("torchext.checkpoint", "torchext.amp", "torchext.inference", "torchext.inspect", "torchext.compat"),
    *("torchext.testing.plugin", "torchext"),
)
HEADERS = Path(__file__).resolve().parents[2] / "torchext" / "include" / "torchext"


def public_names(module: str) -> list[str]:
    """Return the names in the `__all__` of `module` that are not modules themselves, in that order."""
    found = import_module(module)
    return [name for name in found.__all__ if not isinstance(getattr(found, name), ModuleType)]


def home_of(module: str, name: str) -> str:
    """Return the first public module that has the object `name` of `module` under this name."""
    value = getattr(import_module(module), name)
    return next((other for other in MODULES if getattr(import_module(other), name, None) is value), module)


class PublicApi(SphinxDirective):  # type: ignore[misc]
    """The public names of the module that is the argument."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        module = self.arguments[0]
        homes = {name: home_of(module, name) for name in public_names(module)}
        own = sorted((name for name, home in homes.items() if home == module), key=lambda name: name[0].isupper())
        lines = [f".. automodule:: {module}", "   :no-members:", "", f".. currentmodule:: {module}", ""]
        described = [name for name in own if _kind(module, name) != "data"]
        lines += [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in described)] if own else []
        for name in own:
            lines += ["", f".. auto{_kind(module, name)}:: {name}"]
        return [*self._parsed(lines), *self._links(module, homes)]

    def _links(self, module: str, homes: dict[str, str]) -> list[nodes.Node]:
        """Return entries for the names that other modules document, each with a link."""
        lines = []
        for name, home in homes.items():
            if home != module:
                kind = _kind(module, name)
                # autodoc has indexed a class under its `__module__` already.
                is_indexed = getattr(getattr(import_module(module), name), "__module__", "") == module
                lines += ["", f".. py:{kind}:: {name}", *["   :no-index:"] * is_indexed, ""]
                lines += [f"   The same as :py:obj:`{home}.{name}`."]
        found = self._parsed(lines)
        # Without a module, viewcode ignores an entry: the page of the source links to where the name is documented.
        for signature in (one for node in found for one in node.findall(addnodes.desc_signature)):
            signature["module"] = ""
        return found

    def _parsed(self, lines: list[str]) -> list[nodes.Node]:
        return list(self.parse_text_to_nodes(StringList([*lines, ""], source=self.get_source_info()[0])))


def _kind(module: str, name: str) -> str:
    value = getattr(import_module(module), name)
    if isinstance(value, type):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if callable(value) else "data"


class CppHeaders(SphinxDirective):  # type: ignore[misc]
    """The public C++ headers, each with a heading."""

    def run(self) -> list[nodes.Node]:
        lines = []
        for header in sorted(HEADERS.glob("*.h")):
            source = f"/{os.path.relpath(header, self.env.srcdir)}"
            lines += [f"## {header.name}", "", f"```{{literalinclude}} {source}", ":language: cpp", "```", ""]
        return list(self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True))


class ApiName(SphinxRole):  # type: ignore[misc]
    """Code in docstrings, which is a link where it is a name of the API."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        name = self.text.removesuffix("()")
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name):
            return [nodes.literal(self.text, self.text)], []
        text = f"{self.text} <{name}>"
        return PyXRefRole()("py:obj", f":py:obj:`{text}`", text, self.lineno, self.inliner)  # type: ignore[no-any-return]


def read_as_markdown(_app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Let letters follow code, as in Markdown: reST takes "`x`s" for unfinished markup. Link paths of pages."""
    text = re.sub(r"(?<!`)`([^`]+)`(?=\w)", r"`\1`\\ ", "\n".join(lines))
    text = re.sub(r"(?<![\w/`])docs/([\w/]+)\.md", r":doc:`/\1`", text)
    lines[:] = text.split("\n")


def drop_docstrings_of_types(_app: Sphinx, what: str, _name: str, value: Any, _options: Any, lines: list[str]) -> None:
    """Leave out what a constant has from its type, such as the docstring of `str`."""
    if what == "data" and getattr(value, "__doc__", None) == type(value).__doc__:
        lines.clear()


def tidy_texts(_app: Sphinx, doctree: nodes.document, _docname: str) -> None:
    """Put a dash between a parameter and its description, and drop modules from signatures with a `ParamSpec`.

    Elsewhere, two hyphens are those of a flag.
    """
    for text in list(doctree.findall(nodes.Text)):
        if str(text) == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))
    for signature in doctree.findall(addnodes.desc_signature):
        for text in list(signature.findall(nodes.Text)):
            if "~" in text:
                text.parent.replace(text, nodes.Text(re.sub(r"~(\w+\.)*~?", "", text)))


_ATTRIBUTES: dict[str, list[str]] = {}


def hide_attributes(_app: Sphinx, what: str, name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Hide the docstrings of attributes from napoleon, which takes words before a colon for their type."""
    if what in ("attribute", "data", "property"):
        _ATTRIBUTES[name] = lines[:]
        lines.clear()


def show_attributes(_app: Sphinx, _what: str, name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Undo `hide_attributes`."""
    lines[:0] = _ATTRIBUTES.pop(name, [])


def skip_fields_without_words(_app: Sphinx, _what: str, name: str, value: Any, skip: bool, _options: Any) -> bool:
    """Leave out the fields of named tuples, which the section "Attributes" of their classes describes."""
    return skip or str(getattr(value, "__doc__", "")).startswith("Alias for field number")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive, the role and the changes to docstrings."""
    app.add_directive("public-api", PublicApi)
    app.add_directive("cpp-headers", CppHeaders)
    app.add_role("api-name", ApiName())
    app.connect("autodoc-process-docstring", read_as_markdown, priority=400)
    app.connect("autodoc-process-docstring", hide_attributes, priority=450)  # napoleon has 500
    app.connect("autodoc-process-docstring", show_attributes, priority=550)
    app.connect("autodoc-process-docstring", drop_docstrings_of_types, priority=300)
    app.connect("doctree-resolved", tidy_texts)
    app.connect("autodoc-skip-member", skip_fields_without_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
