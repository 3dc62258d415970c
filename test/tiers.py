"""The tiers of the suite: the everyday tests of `make test`, and the rest, which `make ci` adds.

A run has one of these tiers (`--tier`):

- `everyday`, the default: no test that is marked `ci`, some cases of a test that is marked `cases`, and less of each
  test that is marked `scaled`.
- `rest`: what the everyday tier leaves out, and all of each `scaled` test.
- `all`: both.

Everyday choices depend on a seed (`--choice`), by default the commit, so that other cases are chosen over time. A test
that is named on the command line (`FILE::TEST`) runs in any tier, unless `--tier` is given. Tests that cannot run here
are not collected: they need a device, an owner of the `Fake` key, random programs, or `--long`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
import torch

__all__ = ["amount", "chosen", "files_without_everyday_tests", "is_long", "is_whole_everyday_suite", "is_whole_suite"]

Value = TypeVar("Value")

EVERYDAY, REST, ALL = "everyday", "rest", "all"


class _Run:
    """The options of this run."""

    tier = EVERYDAY
    choice = ""
    is_long = False
    unavailable: frozenset[str] = frozenset()  # marks
    files_without_everyday_tests: frozenset[Path] = frozenset()


# ---- For tests.


def is_long() -> bool:
    """Return true for the long sweeps."""
    return _Run.is_long


def is_whole_suite(config: pytest.Config) -> bool:
    """Return true if this run has all tests of its tier. A worker of pytest-xdist collects all, but runs a part."""
    options = config.option
    is_narrowed = (
        options.keyword or options.markexpr or options.deselect or options.ignore or getattr(options, "lf", False)
    )
    return not is_narrowed and [Path(one).name for one in config.args] == ["test"]


def is_whole_everyday_suite(config: pytest.Config) -> bool:
    """Return true if this process reports all everyday tests and no others, which workers of pytest-xdist do not."""
    return _Run.tier == EVERYDAY and is_whole_suite(config) and not hasattr(config, "workerinput")


def files_without_everyday_tests() -> frozenset[Path]:
    """Return the collected files all of whose tests are left to `make ci`."""
    return _Run.files_without_everyday_tests


def amount(everyday: Value, everything: Value) -> Value:
    """Return how much a `scaled` test does in this run."""
    return everyday if _Run.tier == EVERYDAY else everything


def chosen(values: Iterable[Value], count: int, *names: object) -> list[Value]:
    """Return `count` of the values in their order. The choice of the run and the names determine which."""
    every = list(values)
    ranks = sorted(range(len(every)), key=lambda place: _rank(*names, place))
    return [every[place] for place in sorted(ranks[:count])]


def _rank(*names: object) -> str:
    return hashlib.sha256("\0".join(map(str, (_Run.choice, *names))).encode()).hexdigest()


# ---- For pytest.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select tests."""
    parser.addoption("--tier", choices=(EVERYDAY, REST, ALL), help="which tests to run: tiers.py")
    parser.addoption("--choice", default="", help="the seed of the everyday choices, by default the commit")
    parser.addoption("--long", action="store_true", help="also run the long sweeps, and everything else (`make sweep`)")


def pytest_configure(config: pytest.Config) -> None:
    """Read the options. Workers of pytest-xdist receive the choice of the process that started them."""
    config.option.choice = config.option.choice or _commit(config.rootpath)
    _Run.choice = config.option.choice
    _Run.is_long = config.getoption("--long")
    is_named = _names_tests(config)
    _Run.tier = ALL if _Run.is_long else config.getoption("--tier") or (ALL if is_named else EVERYDAY)
    lacking = {
        "long": not _Run.is_long and not is_named,
        "ci": _Run.tier == EVERYDAY,
        "foreign_fakes": not config.getoption("--foreign-fakes"),
        "programs": not config.getoption("--programs"),
        "cuda": not torch.cuda.is_available(),
        "cuda_host": "nullcuda" not in os.environ.get("LD_PRELOAD", ""),
    }
    _Run.unavailable = frozenset(name for name, is_lacking in lacking.items() if is_lacking)


def _names_tests(config: pytest.Config) -> bool:
    return any("::" in argument for argument in config.args)


def _commit(folder: Path) -> str:
    try:
        run = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed
        return "no commit"
    return run.stdout.strip() or "no commit"


def pytest_report_header() -> str:
    """Print the tier and the choice."""
    return f"tier: {_Run.tier}, --choice '{_Run.choice}'"


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Collect nothing from functions and classes that cannot run: their cases need not be made."""
    if not name.startswith(("test", "Test")):
        return None
    marks = getattr(obj, "pytestmark", [])
    own = {mark.name for mark in (marks if isinstance(marks, list) else [marks])}
    return [] if _Run.unavailable & {*own, *(mark.name for mark in collector.iter_markers())} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other tiers."""
    wanted = [item for item in items if not _Run.unavailable & {mark.name for mark in item.iter_markers()}]
    everyday = _everyday(wanted)
    if not _names_tests(config):
        _Run.files_without_everyday_tests = frozenset({item.path for item in wanted} - {item.path for item in everyday})
    if _Run.tier == EVERYDAY:
        wanted = [item for item in wanted if item in everyday]
    elif _Run.tier == REST:
        wanted = [item for item in wanted if item not in everyday or _is_scaled(item)]
    kept = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = wanted


def _everyday(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the items of the everyday tier."""
    everyday = set()
    cases: dict[int, list[pytest.Item]] = {}  # by mark: the cases of a test share it
    counts: dict[int, int] = {}
    for item in items:
        mark = item.get_closest_marker("cases")
        if item.get_closest_marker("ci"):
            continue
        if mark is None:
            everyday.add(item)
        else:
            cases.setdefault(id(mark), []).append(item)
            counts[id(mark)] = mark.args[0]
    for key, same in cases.items():
        everyday.update(sorted(same, key=lambda item: _rank(item.nodeid))[: counts[key]])
    return everyday


def _is_scaled(item: pytest.Item) -> bool:
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
    return is_property or item.get_closest_marker("scaled") is not None
