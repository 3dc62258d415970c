"""The tiers of the suite: each test is in one of them, the everyday choice is repeatable, and its budget is kept."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import cpu_times
import forked
import pytest
import tiers
from pairs import parametrize_pairs

ROOT = Path(__file__).parents[2]

# Files without everyday tests, and why.
WITHOUT_EVERYDAY_TESTS = {
    "dry_run/test_against_gloo.py": "jobs of real processes. test_initial_weights has one every day",
    "package/test_core.py": "compiles six programs",
    "package/test_site.py": "builds the site",
}

SUITE = """
import pytest

def test_of_every_day(): pass
@pytest.mark.ci
def test_of_ci(): pass
@pytest.mark.cases(3)
@pytest.mark.parametrize("case", range(20))
def test_of_many_cases(case): pass
@pytest.mark.scaled
def test_of_both(): pass
@pytest.mark.long
@pytest.mark.parametrize("case", range(20))
def test_of_sweeps(case): pass
class TestGroup:
    pytestmark = pytest.mark.ci
    def test_in_it(self): pass
"""
CONFTEST = """
import tiers

def pytest_addoption(parser):
    tiers.pytest_addoption(parser)
    parser.addoption("--foreign-fakes", action="store_true")
    parser.addoption("--programs", type=int, default=0)

pytest_configure = tiers.pytest_configure
pytest_report_header = tiers.pytest_report_header
pytest_pycollect_makeitem = tiers.pytest_pycollect_makeitem
pytest_collection_modifyitems = tiers.pytest_collection_modifyitems
"""


@pytest.fixture
def collect(tmp_path: Path) -> Callable[..., list[str]]:
    """Return a function that collects the tests of `SUITE` with some options."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    ci\n    cases(n)\n    scaled\n    long\n")
    (tmp_path / "test_suite.py").write_text(SUITE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "test")}

    def run(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        done = forked.run([*command, "--choice", "0", *options], cwd=tmp_path, env=environment)
        return re.findall(r"^test_suite\.py::(\S+)$", done.stdout, re.MULTILINE)

    return run


@pytest.mark.ci
def test_each_test_is_in_one_tier_and_scaled_ones_are_in_both(collect: Callable[..., list[str]]) -> None:
    everyday, rest, everything = collect(), collect("--tier", "rest"), collect("--tier", "all")
    assert sorted({*everyday, *rest}) == sorted(everything)
    assert {*everyday} & {*rest} == {"test_of_both"}
    assert {*everyday} >= {"test_of_every_day"}
    assert {*rest} >= {"test_of_ci", "TestGroup::test_in_it"}
    assert len([name for name in everyday if "many_cases" in name]) == 3


@pytest.mark.ci
def test_choice_depends_on_its_seed_only(collect: Callable[..., list[str]]) -> None:
    assert collect() == collect()
    assert len({tuple(collect("--choice", seed)) for seed in "abc"}) > 1


@pytest.mark.ci
def test_long_tests_are_collected_with_the_others(collect: Callable[..., list[str]]) -> None:
    assert not [name for name in collect("--tier", "all") if "sweeps" in name]
    assert len(collect("--long")) == 20 + len(collect("--tier", "all"))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["test_of_ci", "test_of_sweeps[3]", "TestGroup::test_in_it"])
def test_test_that_is_named_runs_in_any_tier(collect: Callable[..., list[str]], name: str) -> None:
    assert collect(f"test_suite.py::{name}") == [name]


@pytest.mark.ci
def test_each_file_has_an_everyday_test(pytestconfig: pytest.Config) -> None:
    if not tiers.is_whole_suite(pytestconfig):
        pytest.skip("only some files were collected")
    names = {str(path.relative_to(ROOT / "test")) for path in tiers.files_without_everyday_tests()}
    assert names == set(WITHOUT_EVERYDAY_TESTS)


def test_workers_do_not_report_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers._Run, "tier", "everyday")
    run = argparse.Namespace(
        args=["test"], option=argparse.Namespace(keyword="", markexpr="", deselect=None, ignore=None)
    )
    assert tiers.is_whole_everyday_suite(cast("pytest.Config", run))
    run.workerinput = {}
    assert not tiers.is_whole_everyday_suite(cast("pytest.Config", run))


def test_chosen_values_keep_their_order() -> None:
    assert tiers.chosen(range(10), 10) == [*range(10)]
    assert sorted(found := tiers.chosen(range(100), 5, "name")) == found
    assert len(found) == 5


def test_covering_array_has_all_pairs_of_values() -> None:
    values = {"a": [1, 2, 3], "b": ["x", "y"], "c": [None, True, False, 0.5]}
    mark = parametrize_pairs(**values).mark
    assert mark.args[0] == ("a", "b", "c")
    for (i, one), (j, other) in itertools.combinations(enumerate(values.values()), 2):
        assert {(case[i], case[j]) for case in mark.args[1]} == {*itertools.product(one, other)}
    assert len(mark.args[1]) < 24


@pytest.mark.ci
def test_everyday_suite_stays_within_its_budget(pytestconfig: pytest.Config) -> None:
    record = json.loads(cpu_times.RECORD.read_text()) if cpu_times.RECORD.exists() else {}
    if record.get("choice") != pytestconfig.option.choice:
        pytest.skip("the everyday suite has not passed on this commit: run `make test`")
    seconds, budget = record["seconds"], cpu_times.budget(pytestconfig)
    assert seconds <= budget, f"{seconds} s of processor time, {budget:.0f} are allowed: `make slowest` lists the tests"
