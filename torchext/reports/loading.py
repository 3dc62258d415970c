"""Reports of dry runs that were written as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from ..internals import terminal

__all__ = ["Report", "load_report"]

COMMAND = "dry-run"
NEEDED = ("program", "world_size", "exit_code", "other_mismatches", "ranks")


class Report:
    """The immutable report of a dry run. Prints as the command line prints it.

    Args:
        content: The content of the JSON of `torchext dry-run --json`.

    Raises:
        ValueError: `content` is not the report of a dry run, or has another version of the schema.
    """

    __slots__ = ("_content",)

    _content: dict[str, Any]

    def __init__(self, content: Mapping[str, Any]) -> None:
        if not isinstance(content, Mapping) or content.get("command") != COMMAND:
            found = content.get("command") if isinstance(content, Mapping) else content
            raise ValueError(f"Expected a report with `command` {COMMAND!r}, got {found!r}.")
        if content.get("schema") != terminal.SCHEMA:
            raise ValueError(f"Expected a report with `schema` {terminal.SCHEMA}, got {content.get('schema')!r}.")
        missing = [key for key in NEEDED if key not in content]
        if missing:
            raise ValueError(f"The report has no {' and no '.join(f'`{key}`' for key in missing)}.")
        object.__setattr__(self, "_content", json.loads(json.dumps(content)))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A report is immutable: cannot set `{name}`.")

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return int(self._content["exit_code"])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran, in the order of the runs."""
        return tuple(rank["rank"] for rank in self._content["ranks"])

    def to_dict(self) -> dict[str, Any]:
        """Return the content of the JSON."""
        return deepcopy(self._content)

    def to_html(self) -> str:
        """Return the report of `torchext dry-run --report`: a self-contained HTML document."""
        from .text import html_report

        return html_report(self._content)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self._content == other._content

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        from .text import text_report

        size = self._content["world_size"]
        texts = [text_report(rank, size) for rank in self._content["ranks"]]
        return "\n\n".join([*texts, *self._content["other_mismatches"]])

    def __repr__(self) -> str:
        ranks = ", ".join(map(str, self.ranks)) or "none"
        return f"<Report: ranks {ranks} of {self._content['world_size']}, exit code {self.exit_code}>"

    def _repr_html_(self) -> str:
        from .text import html_tables

        return html_tables(self._content)


def load_report(path: str | Path) -> Report:
    """Return the report that `torchext dry-run --json FILE` has written.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON, not the report of a dry run, or has another version of the schema.

    Example:
        >>> load_report("report.json")  # doctest: +SKIP
        <Report: ranks 0, 511 of 1024, exit code 0>
    """
    try:
        return Report(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:
        what = "The file is not JSON." if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) else str(error)
        raise ValueError(f"{path}: {what}") from error
