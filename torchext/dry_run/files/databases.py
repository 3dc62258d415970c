"""Redirect SQLite, whose C code opens files by name, to the files of a dry run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from .imports import when_imported
from .libraries import place_of
from .overlay import Overlay
from .replacing import name_as

__all__ = ["redirect_databases"]

# The other files of a database that has not been closed.
COMPANIONS = ("-wal", "-journal")

# Statements that open other files. The name is a string, or the first parameter.
OPENING = re.compile(
    r"""(?P<before>\b(?:attach\s+(?:database\s+)?|vacuum\s+(?:\w+\s+)?into\s+))"""
    r"""(?P<name>'(?:[^']|'')*'|"(?:[^"]|"")*"|\?\d*|[:@$]\w+)""",
    re.IGNORECASE,
)


def redirect_databases(overlay: Overlay) -> None:
    """Replace the classes and functions of `sqlite3` when its module in C is imported."""
    when_imported("_sqlite3", lambda module: _redirect(overlay, module))


def _redirect(overlay: Overlay, module: Any) -> None:
    def placed(database: Any, *, is_uri: bool) -> Any:
        return _uri_placed(overlay, database) if is_uri else _placed(overlay, database)

    cursor = _cursor_class(module.Cursor, placed)
    connection = _connection_class(module.Connection, cursor, placed)
    connect = module.connect

    def connect_apart(database: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) < 5:
            kwargs.setdefault("factory", connection)
        return connect(database, *args, **kwargs)

    module.connect = name_as(connect_apart, connect)
    module.Connection, module.Cursor = connection, cursor


def _connection_class(original: Any, cursor_class: Any, placed: Callable[..., Any]) -> type:
    class Connection(original):  # type: ignore[misc]
        def __init__(self, database: Any, *args: Any, **kwargs: Any) -> None:
            self._is_uri = bool(kwargs.get("uri", args[6] if len(args) > 6 else False))
            super().__init__(placed(database, is_uri=self._is_uri), *args, **kwargs)

        def cursor(self, factory: Any = cursor_class) -> Any:
            return super().cursor(factory)

        def execute(self, *args: Any) -> Any:
            return self.cursor().execute(*args)

        def executemany(self, *args: Any) -> Any:
            return self.cursor().executemany(*args)

        def executescript(self, *args: Any) -> Any:
            return self.cursor().executescript(*args)

    return name_as(Connection, original)  # type: ignore[no-any-return]


def _cursor_class(original: Any, placed: Callable[..., Any]) -> type:
    class Cursor(original):  # type: ignore[misc]
        def execute(self, sql: Any, *args: Any) -> Any:
            return super().execute(*_statement_placed(sql, *args, placed=self._placed))

        def executescript(self, sql: Any) -> Any:
            return super().executescript(*_statement_placed(sql, placed=self._placed))

        def _placed(self, database: Any) -> Any:
            return placed(database, is_uri=getattr(self.connection, "_is_uri", False))

    return name_as(Cursor, original)  # type: ignore[no-any-return]


def _statement_placed(sql: Any, *args: Any, placed: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the arguments of a statement with places for the databases that it opens."""
    if not isinstance(sql, str) or OPENING.search(sql) is None:
        return sql, *args

    def replace(found: re.Match[str]) -> str:
        name = found["name"]
        if name[0] not in "'\"":
            return found[0]
        text = name[1:-1].replace(name[0] * 2, name[0])
        return found["before"] + "'" + str(placed(text)).replace("'", "''") + "'"

    parameters = args[0] if args else ()
    found = OPENING.search(sql)
    assert found is not None
    if isinstance(parameters, dict):
        name = found["name"][1:]
        parameters = {key: placed(value) if key == name else value for key, value in parameters.items()}
    elif found["name"][0] == "?" and parameters:
        parameters = (placed(parameters[0]), *parameters[1:])
    return OPENING.sub(replace, sql), *((parameters,) if args else ())


def _uri_placed(overlay: Overlay, uri: Any) -> Any:
    if not isinstance(uri, str) or not uri.startswith("file:"):
        return _placed(overlay, uri)
    path, question, query = uri[len("file:") :].partition("#")[0].partition("?")
    if path.startswith("//"):
        path = "/" + path[2:].partition("/")[2]
    options = parse_qs(query)
    path = unquote(path)
    if not path or path.startswith(":") or "memory" in options.get("mode", ()):
        return uri
    return f"file:{quote(_placed(overlay, path))}{question}{query}"


def _placed(overlay: Overlay, database: Any) -> Any:
    if database in (":memory:", b":memory:", "", b""):
        return database
    place = place_of(overlay, database, "r+")
    with contextlib.suppress(OSError, TypeError):
        for companion in COMPANIONS:
            path = overlay.resolve(_text(database) + companion)
            if overlay.exists(path):
                overlay.copy_up(path)
    return place


def _text(database: Any) -> str:
    import os

    return os.fsdecode(database)
