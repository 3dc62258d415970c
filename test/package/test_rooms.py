"""The components of the sources match their tables, and their dependencies contain no cycle.

csrc/FILES.md and torchext/README.md have a table with the columns `component | purpose | may include` (or `may
import`). A component ("room" in this file) is a directory, a file, or the `__init__` of a package. `.` contains all
files that belong to no other component. A file belongs to the component with the longest matching name.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
TORCHEXT = ROOT / "torchext"
HEADERS = TORCHEXT / "include" / "torchext"


class Arrow(NamedTuple):
    """One file needs another. Both are named without their suffixes, from the root of their language."""

    user: str
    used: str


class Language(NamedTuple):
    name: str
    page: Path
    files: Callable[[], frozenset[str]]
    arrows: Callable[[], frozenset[Arrow]]


# ---- Dependencies between the sources.


@functools.cache
def headers_and_units() -> frozenset[str]:
    return frozenset(name_in(CSRC, path) for path in CSRC.rglob("*.[ch]*"))


@functools.cache
def includes() -> frozenset[Arrow]:
    found = set()
    for path in CSRC.rglob("*.[ch]*"):
        for name in re.findall(r'^#include "(.+)"', path.read_text(), re.M):
            beside = (path.parent / name).resolve()
            found.add(Arrow(name_in(CSRC, path), name_in(CSRC, beside if beside.exists() else CSRC / name)))
        for name in re.findall(r"^#include <torchext/(.+)>", path.read_text(), re.M):
            if name in public_headers():
                found.add(Arrow(name_in(CSRC, path), public_headers()[name]))
    return without_loops(found)


@functools.cache
def public_headers() -> dict[str, str]:
    """Return the files that define the declarations of the public headers, by the table of csrc/FILES.md."""
    text = (CSRC / "FILES.md").read_text()
    rows = re.search(r"^\| header \| defined in \|\n\|[ |-]+\|\n((?:\|.*\|\n)+)", text, re.M)
    assert rows is not None
    return dict(re.findall(r"^\| `(.+)` \| `(.+)` \|$", rows[1], re.M))


@functools.cache
def modules() -> frozenset[str]:
    sources = (path for path in TORCHEXT.rglob("*") if path.suffix in (".py", ".pyi"))
    return frozenset(name_in(TORCHEXT, path) for path in sources) - {""}


@functools.cache
def imports() -> frozenset[Arrow]:
    """Return all imports: in functions, for type checking, and by name with `import_module()`."""
    found = set()
    for path in TORCHEXT.rglob("*.py"):
        user = name_in(TORCHEXT, path)
        for name in imported_names(path):
            if (used := module_of(name)) is not None:
                found.add(Arrow(user, used))
    return without_loops(found)


def imported_names(path: Path) -> Iterator[str]:
    """Return the full names that a module imports: modules, and names in them."""
    package = (TORCHEXT.name, *path.parent.relative_to(TORCHEXT).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function.lstrip("_") == "import_module":
                name = str(node.args[0].value)
                yield ".".join(package) + name if name.startswith(".") else name


def module_of(name: str) -> str | None:
    """Return our module `name`, or the one that contains it; None if it is not ours."""
    parts = name.split(".")
    if parts[0] != TORCHEXT.name:
        return None
    for length in range(len(parts), 0, -1):
        where = TORCHEXT.joinpath(*parts[1:length])
        for path in (where / "__init__.py", where.with_suffix(".py"), where.with_suffix(".pyi")):
            if length > 1 and path.exists():
                return name_in(TORCHEXT, path)
    return "__init__"


def name_in(root: Path, path: Path) -> str:
    return str(path.relative_to(root).with_suffix(""))


def without_loops(arrows: Iterable[Arrow]) -> frozenset[Arrow]:
    return frozenset(arrow for arrow in arrows if arrow.user != arrow.used)


# ---- The tables.


class Row(NamedTuple):
    """The rooms that a room may use: `named`, or, if `is_open`, all but `named`."""

    named: frozenset[str]
    is_open: bool

    def allows(self, room: str) -> bool:
        return (room in self.named) != self.is_open


@functools.cache
def table(page: Path) -> dict[str, Row]:
    """Return the rooms of a page and the permitted dependencies of each: rooms by name, `all`, or `all but` some."""
    found = re.search(
        r"^\| component \| purpose \| may (?:include|import) \|\n\|[ |-]+\|\n((?:\|.*\|\n)+)", page.read_text(), re.M
    )
    assert found is not None, f"{page.name} has no table of rooms"
    rows = {}
    for line in found[1].splitlines():
        room, _, used = (cell.strip() for cell in line.strip("|").split(" | "))
        name = room.strip("`* ").rstrip("/")
        assert name not in rows, f"{name} is there twice"
        rows[name] = Row(frozenset(re.findall(r"`([^`]+?)/?`", used)), used.startswith("all"))
    return rows


def room_of(file: str, rooms: Iterable[str]) -> str | None:
    fitting = (room for room in rooms if room == "." or f"{file}/".startswith(f"{room}/"))
    return max(fitting, key=lambda room: (room != ".", len(room)), default=None)


def between_rooms(arrows: Iterable[Arrow], rooms: Iterable[str]) -> dict[Arrow, Arrow]:
    """Return the arrows between rooms, each with an arrow between files that causes it."""
    found = {Arrow(str(room_of(user, rooms)), str(room_of(used, rooms))): Arrow(user, used) for user, used in arrows}
    return {arrow: example for arrow, example in sorted(found.items()) if arrow.user != arrow.used}


def cycle(arrows: Iterable[Arrow]) -> list[str]:
    """Return a cycle of arrows, if there is one."""
    used: dict[str, set[str]] = {}
    for arrow in arrows:
        used.setdefault(arrow.user, set()).add(arrow.used)
    done: set[str] = set()

    def search(way: list[str]) -> list[str]:
        for name in sorted(used.get(way[-1], ())):
            if name in way:
                return [*way[way.index(name) :], name]
            if name not in done and (found := search([*way, name])):
                return found
        done.add(way[-1])
        return []

    return next((found for name in sorted(used) if (found := search([name]))), [])


CPP = Language("C++", CSRC / "FILES.md", headers_and_units, includes)
PYTHON = Language("Python", TORCHEXT / "README.md", modules, imports)


@pytest.mark.parametrize("language", [CPP, PYTHON], ids=lambda language: language.name)
class TestRooms:
    def test_each_file_is_in_a_room(self, language: Language) -> None:
        rooms = table(language.page)
        assert not [file for file in sorted(language.files()) if room_of(file, rooms) is None]

    def test_each_folder_is_a_room(self, language: Language) -> None:
        folders = {file.rpartition("/")[0] or "." for file in language.files()}
        assert folders <= table(language.page).keys()

    def test_rows_name_rooms(self, language: Language) -> None:
        rooms = table(language.page)
        assert {used for row in rooms.values() for used in row.named} <= rooms.keys()


@pytest.mark.parametrize("language", [CPP, PYTHON], ids=lambda language: language.name)
class TestArrows:
    def test_each_row_is_a_room(self, language: Language) -> None:
        rooms = table(language.page)
        assert rooms.keys() == {room_of(file, rooms) for file in language.files()}

    @pytest.mark.cases(1)
    def test_arrows_are_those_of_the_table(self, language: Language) -> None:
        rooms = table(language.page)
        found = between_rooms(language.arrows(), rooms)
        assert not {f"{user} -> {used}": why for (user, used), why in found.items() if not rooms[user].allows(used)}
        listed = {Arrow(room, used) for room, row in rooms.items() if not row.is_open for used in row.named}
        assert not listed - found.keys(), "nothing needs these"

    def test_no_arrow_leads_up(self, language: Language) -> None:
        rooms = table(language.page)
        assert not cycle(between_rooms(language.arrows(), rooms))


def test_the_core_and_the_libraries_include_no_extension() -> None:
    allowed = {"core": ("core/", "libraries/support/"), "libraries": "libraries/"}
    beyond = [
        arrow
        for arrow in includes()
        for folder, where in allowed.items()
        if arrow.user.startswith(f"{folder}/") and not arrow.used.startswith(where)
    ]
    assert not beyond


CORE = {"amp", "deferred_init", "dynamo", "fake", "inference", "inspect", "internals"}
APPLICATIONS = {"advice", "check_init", "checkpoint", "commands", "dry_run", "memory", "reports", "testing"}


def test_the_core_imports_no_application() -> None:
    passed_on = Arrow("deferred_init/__init__", "check_init/__init__")  # for type checkers; imported at the first use
    found = [
        arrow
        for arrow in imports() - {passed_on}
        if arrow.user.partition("/")[0] in CORE and arrow.used.partition("/")[0] in APPLICATIONS
    ]
    assert not found


def test_importing_torchext_imports_no_application() -> None:
    code = "import sys, torchext; print(*{name.split('.')[1] for name in sys.modules if name.startswith('torchext.')})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert imported >= CORE - {"internals"}
    assert not imported & APPLICATIONS


@pytest.mark.parametrize("room", ["checkpoint", "dry_run", "memory"])
def test_applications_are_imported_when_they_are_used(room: str) -> None:
    code = f"import torchext; print(torchext.{room}.__name__, len(dir(torchext.{room})) > 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"torchext.{room} True\n"


def test_no_module_needs_itself_by_a_detour() -> None:
    assert not cycle(imports())


class TestCycle:
    def test_is_found(self) -> None:
        assert cycle([Arrow("a", "b"), Arrow("b", "c"), Arrow("c", "b")]) == ["b", "c", "b"]

    def test_is_not_found_where_two_ways_meet(self) -> None:
        assert not cycle([Arrow("a", "b"), Arrow("a", "c"), Arrow("b", "d"), Arrow("c", "d")])


def test_public_headers_are_defined_as_in_the_table_and_include_no_private_ones() -> None:
    defining_nothing = {"macros.h", "torchext.h"}
    assert {path.name for path in HEADERS.iterdir()} == {*public_headers(), *defining_nothing}
    for name, unit in public_headers().items():
        assert (CSRC / f"{unit}.cpp").exists()
        assert '#include "' not in (HEADERS / name).read_text()
