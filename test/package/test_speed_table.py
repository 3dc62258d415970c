"""The table of `make bench`: which rows it calls slower than the stored ones."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from documents import ROOT


@pytest.fixture(scope="module")
def table() -> ModuleType:
    """Return benchmarks/table.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        return importlib.import_module("benchmarks.table")


def row_with(table: ModuleType, *ratios: float) -> Any:
    """Return a row whose rounds have these ratios."""
    return table.row_of("a group", [table.Sample("a row", ratio, 1.0) for ratio in ratios])


@pytest.mark.parametrize(
    ("ratios", "is_named"),
    [
        pytest.param((1.0, 1.0, 1.0), False, id="equal"),
        pytest.param((1.1, 1.1, 1.1), False, id="within-15-percent"),
        pytest.param((1.2, 1.2, 1.2), True, id="slower"),
        pytest.param((0.9, 1.3, 1.4), False, id="slower-within-noise"),
        pytest.param((0.5, 0.5, 0.5), False, id="faster"),
    ],
)
def test_slower_rows_are_named(table: ModuleType, ratios: tuple[float, ...], is_named: bool) -> None:
    stored = {"a row": row_with(table, 0.8, 1.0, 1.2)}
    lines = table.regressions({"a row": row_with(table, *ratios)}, stored)
    assert [line.startswith("a row:") for line in lines] == [True] * is_named


def test_rows_that_are_not_stored_are_not_slower(table: ModuleType) -> None:
    assert table.regressions({"a row": row_with(table, 9.0)}, {}) == []


def test_limits_are_ratios_to_the_peer(table: ModuleType) -> None:
    row = table.row_of("a group", [table.Sample("a row", 3.0, 4.0, limit=1.0, at_most=0.5)])
    assert (row.ratio, row.limit, row.at_most) == (0.75, 0.25, 0.5)


def test_page_groups_rows_by_their_measurement(table: ModuleType) -> None:
    one = row_with(table, 1.0)
    page = table.page({"new": replace(one, stamp="today"), "old": replace(one, stamp="before")})
    assert page.index("Measured today") < page.index("| new |") < page.index("Measured before") < page.index("| old |")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(2.0, "2 s"), (1.0, "1 s"), (0.25, "250 ms"), (4e-6, "4 us"), (7e-10, "0.7 ns")],
)
def test_durations_have_readable_units(table: ModuleType, seconds: float, text: str) -> None:
    assert table.cells("a row", row_with(table, seconds))[1] == text


def test_every_group_has_stored_rows(table: ModuleType) -> None:
    stored = json.loads(table.STORED.read_text())
    assert {row["group"] for row in stored.values()} == set(table.GROUPS)
