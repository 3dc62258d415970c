"""Redirect libraries whose C, C++ or Rust code opens files by name to the files of a dry run."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, quote, unquote

from .functions import name_as
from .overlay import Overlay
from .tree import exists_at, real, when_imported

__all__ = ["redirect_databases", "redirect_libraries"]


class _From(NamedTuple):
    """The argument of a call that holds the mode of the file.

    Attributes:
        argument: The name of the argument.
        position: The position of the argument.
        default: The default value.
    """

    argument: str
    position: int
    default: str


class _Opener(NamedTuple):
    """A function that opens files.

    Attributes:
        name: The name of the function in its module.
        position: The position of the argument, which may be a path, a list of paths, or another object.
        argument: The name of that argument.
        mode: The mode, as for `open()`.
    """

    name: str
    position: int
    argument: str
    mode: str | _From = "r"


OPENERS: dict[str, tuple[_Opener, ...]] = {
    "_ctypes": (_Opener("dlopen", 0, "name"),),
    "h5py._hl.files": (_Opener("File.__init__", 1, "name", _From("mode", 2, "r")),),
    "pyarrow": (
        _Opener("OSFile", 0, "path", _From("mode", 1, "r")),
        _Opener("memory_map", 0, "path", _From("mode", 1, "r")),
        _Opener("create_memory_map", 0, "path", "w"),
    ),
    "pyarrow.csv": (_Opener("read_csv", 0, "input_file"), _Opener("write_csv", 1, "output_file", "w")),
    "pyarrow.feather": (_Opener("read_table", 0, "source"), _Opener("write_feather", 1, "dest", "w")),
    "pyarrow.parquet.core": (
        _Opener("ParquetFile.__init__", 1, "source"),
        _Opener("ParquetWriter.__init__", 1, "where", "w"),
        _Opener("read_metadata", 0, "where"),
        _Opener("read_schema", 0, "where"),
        _Opener("read_table", 0, "source"),
    ),
    "safetensors._safetensors_rust": (
        _Opener("safe_open", 0, "filename"),
        _Opener("serialize_file", 1, "filename", "w"),
    ),
    "tokenizers.tokenizers": (
        _Opener("Tokenizer.from_file", 0, "path"),
        _Opener("Tokenizer.save", 1, "path", "w"),
        _Opener("Tokenizer.train", 1, "files"),
        _Opener("models.Model.save", 1, "folder", "r+"),
        _Opener("models.BPE.from_file", 0, "vocab"),
        _Opener("models.BPE.from_file", 1, "merges"),
        _Opener("models.BPE.read_file", 0, "vocab"),
        _Opener("models.BPE.read_file", 1, "merges"),
        _Opener("models.WordPiece.from_file", 0, "vocab"),
        _Opener("models.WordPiece.read_file", 0, "vocab"),
        _Opener("models.WordLevel.from_file", 0, "vocab"),
        _Opener("models.WordLevel.read_file", 0, "vocab"),
    ),
    "torch": (
        _Opener("_C.PyTorchFileReader.__init__", 1, "name"),
        _Opener("_C.PyTorchFileWriter.__init__", 1, "file_name", "w"),
        _Opener("_C.ScriptModule.save", 1, "filename", "w"),
        _Opener("_C.ScriptModule._save_for_mobile", 1, "filename", "w"),
        _Opener("_C.import_ir_module", 1, "filename"),
        _Opener("_C._load_for_lite_interpreter", 0, "filename"),
        _Opener("_C._autograd._ProfilerResult.save", 1, "path", "w"),
        _Opener("_C._autograd._add_execution_trace_observer", 0, "output_file_path", "w"),
        _Opener("UntypedStorage.from_file", 0, "filename", _From("shared", 1, "r")),
        _Opener("from_file", 0, "filename", _From("shared", 1, "r")),
    ),
}


def redirect_libraries(overlay: Overlay) -> None:
    """Replace the functions in `OPENERS` when their modules are imported."""
    for name, openers in OPENERS.items():
        when_imported(name, functools.partial(_redirect_library, overlay, openers))
    _let_extensions_load(overlay)


def place_of(overlay: Overlay, path: Any, mode: str = "r") -> Any:
    """Return the place of a file that code in C opens in this mode. Other objects than paths are returned unchanged."""
    if isinstance(path, (list, tuple)):
        return type(path)(place_of(overlay, element, mode) for element in path)
    if not isinstance(path, (str, bytes, os.PathLike)) or not os.fspath(path):
        return path
    found = overlay.resolve(os.fsdecode(path))
    if any(letter in mode for letter in "wax+"):
        return overlay.to_write(found, keep="w" not in mode)
    place = overlay.place(found)
    # A name of the same file is kept: libraries search beside their name, not beside the target of a link, and the
    # system searches names that are not paths in its own folders.
    return path if not exists_at(place) or _is_same(path, place) else place


def _is_same(path: Any, place: str) -> bool:
    try:
        return os.path.samestat(real.stat(path), real.stat(place))
    except OSError:
        return False


def _redirect_library(overlay: Overlay, openers: tuple[_Opener, ...], module: Any) -> None:
    for opener in openers:
        *owners, name = opener.name.split(".")
        owner = functools.reduce(lambda found, part: getattr(found, part, None), owners, module)
        original = getattr(owner, name, None)
        if original is not None:
            replacement: Any = _opening(overlay, original, opener)
            # Python would bind the replacement of a static or class method to an object.
            is_bound = isinstance(owner, type) and isinstance(
                original, (types.BuiltinFunctionType, types.FunctionType, types.MethodType)
            )
            takes_self = opener.position > 0 and isinstance(vars(owner).get(name), types.FunctionType)
            setattr(owner, name, staticmethod(replacement) if is_bound and not takes_self else replacement)


def _opening(overlay: Overlay, original: Callable[..., Any], opener: _Opener) -> Callable[..., Any]:
    def mode_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        if isinstance(opener.mode, str):
            return opener.mode
        argument, position, default = opener.mode
        given = kwargs.get(argument, args[position] if len(args) > position else default)
        return given if isinstance(given, str) else "r+" if given else "r"

    @functools.wraps(original, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = mode_of(args, kwargs)
        if opener.argument in kwargs:
            kwargs[opener.argument] = place_of(overlay, kwargs[opener.argument], mode)
        elif len(args) > opener.position:
            placed = place_of(overlay, args[opener.position], mode)
            args = (*args[: opener.position], placed, *args[opener.position + 1 :])
        return _program_paths(overlay, original(*args, **kwargs))

    return call


def _program_paths(overlay: Overlay, result: Any) -> Any:
    """Return a result with the program's paths for places, such as those of files that a tokenizer has saved."""
    if isinstance(result, str):
        return overlay.program_path(result)
    return [_program_paths(overlay, element) for element in result] if type(result) is list else result


def _let_extensions_load(overlay: Overlay) -> None:
    """Let Python load extension modules that the program has built."""
    from importlib.machinery import ExtensionFileLoader

    create_module = ExtensionFileLoader.create_module

    def create(self: ExtensionFileLoader, spec: Any) -> Any:
        placed = copy.copy(spec)
        placed.origin = place_of(overlay, spec.origin)
        return create_module(self, placed)

    ExtensionFileLoader.create_module = create  # type: ignore[method-assign]


# ---- Redirect SQLite, whose C code opens files by name, to the files of a dry run


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
    when_imported("_sqlite3", lambda module: _redirect_sqlite(overlay, module))


def _redirect_sqlite(overlay: Overlay, module: Any) -> None:
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
    return os.fsdecode(database)
