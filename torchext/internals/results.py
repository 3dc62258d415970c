"""Result objects as tables and as plain values."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeVar, overload

__all__ = ["Column", "Items", "Table", "plain"]

T = TypeVar("T")


class Column(NamedTuple):
    """A column of a table: its name, the text of a value, and whether the text is aligned to the right."""

    name: str
    text: Callable[[Any], str] = str
    is_number: bool = False


class Table:
    """A table that prints as text and shows as HTML in notebooks. A value of None is an empty cell.

    Args:
        columns: The columns.
        rows: A value for each column.
    """

    def __init__(self, columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
        self.columns = tuple(columns)
        self.rows = tuple(map(tuple, rows))

    def _texts(self) -> list[list[str]]:
        return [
            ["" if value is None else column.text(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def __str__(self) -> str:
        lines = [[column.name for column in self.columns], *self._texts()]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join("  ".join(map(self._aligned, self.columns, line, widths)).rstrip() for line in lines)

    @staticmethod
    def _aligned(column: Column, text: str, width: int) -> str:
        return text.rjust(width) if column.is_number else text.ljust(width)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(column.name)}</th>" for column in self.columns)
        rows = ("".join(map(self._cell, self.columns, texts)) for texts in self._texts())
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in rows)}</tbody></table>"
        )

    @staticmethod
    def _cell(column: Column, text: str) -> str:
        style = ' style="text-align: right"' if column.is_number else ""
        return f"<td{style}>{html.escape(text)}</td>"

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the rows, with their values by the names of the columns."""
        names = [column.name for column in self.columns]
        return [dict(zip(names, map(plain, row), strict=True)) for row in self.rows]


class Items(Sequence[T]):
    """An immutable sequence whose `repr()` is its text."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = tuple(items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), self._items))

    def __repr__(self) -> str:
        return str(self)


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
