"""Documents: results as text, as HTML for notebooks and reports, and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from html import escape
from textwrap import indent
from typing import Any, NamedTuple, TypeAlias, TypeVar, overload

from .text import plain

__all__ = [
    "Code",
    "Column",
    "Document",
    "Items",
    "Part",
    "Picture",
    "Table",
    "Title",
    "as_html",
    "as_markdown",
    "as_text",
]

T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Document:
    """A result that prints as text and shows as HTML in notebooks. Results are frozen dataclasses."""

    def _parts(self) -> Iterable[Part]:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self._parts())

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, which `json.dumps()` takes."""
        return {field.name: plain(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, eq=False, repr=False)
class Items(Document, Sequence[T]):
    """A result that is also the sequence in its first field. Its `repr()` is its text."""

    @property
    def _items(self) -> Sequence[T]:
        items: Sequence[T] = getattr(self, fields(self)[0].name)
        return items

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return str(self)


class Title(NamedTuple):
    """A heading with paragraphs. In HTML it has the class `mark`."""

    text: str
    paragraphs: Sequence[str] = ()
    mark: str = ""


class Code(NamedTuple):
    """Source code, a command or a traceback."""

    text: str


class Picture(NamedTuple):
    """A title, and a function that returns an HTML page. Only HTML shows it."""

    title: str
    page: Callable[[], str]


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        name: Its name.
        text: Returns the text of a value.
        is_optional: Whether it is left out if all its values are None.
        is_code: Whether Markdown shows its texts as code.
    """

    name: str
    text: Callable[[Any], str] = str
    is_optional: bool = False
    is_code: bool = False


class Table:
    """A table. A value of None is an empty cell. Numbers are aligned to the right.

    Args:
        columns: The columns; a string is the name of a column.
        rows: A value for each column.
        title: The title. A table with a title is left out if it has no rows. Markdown folds it.
    """

    def __init__(self, columns: Iterable[str | Column], rows: Iterable[Sequence[Any]], title: str = "") -> None:
        given = [Column(one) if isinstance(one, str) else one for one in columns]
        values = list(zip(*rows, strict=True))
        self.title = title
        self.has_rows: bool = bool(values)
        self._columns = [
            (column, found)
            for column, found in zip(given, values or [()] * len(given), strict=True)
            if not column.is_optional or any(one is not None for one in found)
        ]

    def columns(self) -> Iterator[tuple[Column, bool, list[str]]]:
        """Yield each column, whether it has numbers, and its texts."""
        for column, values in self._columns:
            is_number = all(type(one) in (int, float, type(None)) for one in values)
            yield column, is_number, ["" if one is None else column.text(one) for one in values]

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows, with their values by the names of the columns."""
        names = [column.name for column, _ in self._columns]
        rows = zip(*(values for _, values in self._columns), strict=True)
        return [dict(zip(names, map(plain, row), strict=True)) for row in rows]


Part: TypeAlias = str | Title | Code | Picture | Table
"""A part of a document. A string is a paragraph."""


def _join(separator: str, render: Callable[[Part], str], parts: Iterable[Part]) -> str:
    shown = (one for one in parts if not isinstance(one, Table) or not one.title or one.has_rows)
    return separator.join(filter(None, map(render, shown)))


def as_text(parts: Iterable[Part]) -> str:
    """Return a document for a terminal."""
    return _join("\n\n", _text, parts)


def _text(part: Part) -> str:
    match part:
        case Title(text, paragraphs):
            return "\n".join([text, *paragraphs])
        case Code(text):
            return indent(text, " " * 4)
        case Picture():
            return ""
        case Table(title=title):
            cells = []
            for column, is_number, texts in part.columns():
                width, align = max(map(len, [column.name, *texts])), str.rjust if is_number else str.ljust
                cells.append([align(one, width) for one in (column.name, "-" * width, *texts)])
            lines = ["  ".join(row).rstrip() for row in zip(*cells, strict=True)]
            return "\n".join([title, *lines] if title else lines)
    return part


def as_html(parts: Iterable[Part]) -> str:
    """Return a document as HTML, without a head."""
    return _join("\n", _html, parts)


def _html(part: Part) -> str:
    match part:
        case Title(text, paragraphs, mark):
            return f"<h2{f' class={mark}' * bool(mark)}>{escape(text)}</h2>{''.join(map(_html, paragraphs))}"
        case Code(text):
            return f"<pre>{escape(text)}</pre>"
        case Picture(title, page):
            return f'<h3>{escape(title)}</h3><iframe srcdoc="{escape(page())}"></iframe>'
        case Table(title=title):
            cells = []
            for column, is_number, texts in part.columns():
                tag = '<td style="text-align: right">' if is_number else "<td>"
                cells.append([f"<th>{escape(column.name)}</th>", *(f"{tag}{escape(one)}</td>" for one in texts)])
            head, *rows = (f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
            table = f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"
            return f"<h3>{escape(title)}</h3>{table}" if title else table
    return f"<p>{'<br>'.join(escape(part).splitlines())}</p>" if part else ""


def as_markdown(parts: Iterable[Part]) -> str:
    """Return a document as Markdown."""
    return _join("\n\n", _markdown, parts) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Title(text, paragraphs):
            return "\n\n".join([f"### {text}", *paragraphs])
        case Code(text):
            return f"```\n{text}\n```"
        case Picture():
            return ""
        case Table(title=title):
            cells = []
            for column, is_number, texts in part.columns():
                rule = "---:" if is_number else "---"
                cells.append([column.name, rule, *(_cell(one, column.is_code) for one in texts)])
            table = "\n".join(f"| {' | '.join(row)} |" for row in zip(*cells, strict=True))
            return f"<details><summary>{escape(title)}</summary>\n\n{table}\n\n</details>" if title else table
    return part


def _cell(text: str, is_code: bool) -> str:
    text = text.replace("|", r"\|").replace("\n", " ")
    if not text or not is_code:
        return text
    return f"`` {text} ``" if "`" in text else f"`{text}`"
