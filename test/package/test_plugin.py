"""The plugin that runs foreign suites: its reports, crashes of tests, and the replacements of its modes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import torchext_pytest
from torchext.fake import FakeGPU
from torchext.memory import Fit
from torchext.testing.modes import replace_everywhere

ROOT = Path(__file__).parents[2]

# The suite detects the mode by whether torchext is imported, which must not be the case in the baseline.
SUITE = """
import os, sys, time, unittest
from pathlib import Path

import pytest

HAS_TORCHEXT = "torchext" in sys.modules


def first_time(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def test_passes(): pass
def test_passes_without_torchext_only(): assert not HAS_TORCHEXT, "torchext is here"
def test_fails_always(): assert False
def test_aborts_with_torchext():
    if HAS_TORCHEXT: os.abort()
def test_leaves_with_torchext():
    if HAS_TORCHEXT: os._exit(0)
def test_takes_long_with_torchext():
    if HAS_TORCHEXT: time.sleep(1000)
def test_after_these(): pass
def test_passes_the_first_time_only(): assert first_time("unstable")
def test_skips_with_torchext():
    if HAS_TORCHEXT: pytest.skip("not with torchext")
@pytest.mark.skip
def test_skips_always(): assert False
@pytest.mark.xfail
def test_is_expected_to_fail(): assert False
@pytest.mark.xfail(strict=True)
def test_is_expected_to_fail_and_does_not_with_torchext(): assert HAS_TORCHEXT
@pytest.mark.parametrize("i", [1, 2])
def test_one_of_two(i): assert not (HAS_TORCHEXT and i == 2), f"not {i}"
@pytest.fixture
def broken():
    yield
    assert not HAS_TORCHEXT, "in the teardown"
def test_whose_teardown_fails(broken): pass
class TestCase(unittest.TestCase):
    def test_method(self): self.assertFalse(HAS_TORCHEXT)
    def test_subtests(self):
        for i in range(2):
            with self.subTest(i=i):
                self.assertFalse(HAS_TORCHEXT and i)
"""

DIFFERENT = {
    "test_passes_without_torchext_only": "failed: AssertionError: torchext is here",
    "test_aborts_with_torchext": "crashed: the process was ended by SIGABRT",
    "test_leaves_with_torchext": "crashed: the process ended with status 0",
    "test_takes_long_with_torchext": "timed out: the test exceeded its time limit, and its process was ended",
    "test_is_expected_to_fail_and_does_not_with_torchext": "failed: [XPASS(strict)]",
    "test_one_of_two[2]": "failed: AssertionError: not 2",
    "test_whose_teardown_fails": "error: AssertionError: in the teardown",
    "TestCase::test_method": "failed: AssertionError: True is not false",
    "TestCase::test_subtests": "failed: AssertionError: 1 is not false",
}


class Run:
    """A run of pytest with the plugin in a folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "pytest", "-p", "torchext.testing.plugin", "-p", "no:cacheprovider"]
        self.process = subprocess.run(
            [*command, *arguments, "--torchext-report=report.json"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )

    @property
    def exit_code(self) -> int:
        return self.process.returncode

    @property
    def lines(self) -> list[str]:
        return self.process.stdout.splitlines()

    @cached_property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report

    def section(self, start: str) -> list[str]:
        """Return the lines that are indented below the line that begins with `start`."""
        [first] = [position for position, line in enumerate(self.lines) if line.startswith(start)]
        section = []
        for line in self.lines[first + 1 :]:
            if not line.startswith("  "):
                break
            section.append(line.strip())
        return section


def run(folder: Path, suite: str, *arguments: str) -> Run:
    (folder / "test_suite.py").write_text(suite)
    return Run(folder, *arguments)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("suite"), SUITE, "--torchext=installed", "--torchext-timeout=20")


@pytest.mark.ci
def test_difference_is_listed_with_its_outcome_and_the_first_line_of_its_error(everything: Run) -> None:
    expected = [f"test_suite.py::{name}: {outcome}" for name, outcome in DIFFERENT.items()]
    assert sorted(everything.section("different:")) == sorted(expected)


@pytest.mark.ci
def test_difference_makes_the_exit_code_one(everything: Run) -> None:
    assert everything.exit_code == 1


@pytest.mark.ci
def test_test_that_fails_in_a_second_baseline_is_unstable_and_no_difference(everything: Run) -> None:
    [line] = everything.section("unstable:")
    assert line.startswith("test_suite.py::test_passes_the_first_time_only: failed: ")


ORDER = """
import sys
BROKEN = []
def test_leaves_something(): BROKEN.append(1)
def test_ends_the_process_of_the_baseline():
    if "torchext" not in sys.modules: __import__("os").abort()
def test_fails_after_the_first(): assert not BROKEN
"""


@pytest.mark.long
@pytest.mark.ci
def test_test_that_fails_after_others_in_one_process_is_unstable_and_no_difference(tmp_path: Path) -> None:
    result = run(tmp_path, ORDER, "--torchext=installed")
    assert result.exit_code == 0
    [line] = result.section("unstable:")
    assert line.startswith("test_suite.py::test_fails_after_the_first: failed: ")


@pytest.mark.ci
def test_tests_after_a_crash_are_run(everything: Run) -> None:
    outcomes = everything.report["modes"]["installed"]["outcomes"]
    assert outcomes["test_suite.py::test_after_these"] == "passed"
    assert outcomes["test_suite.py::test_one_of_two[1]"] == "passed"


@pytest.mark.ci
def test_baseline_does_not_import_torchext_and_runs_everything(everything: Run) -> None:
    outcomes = everything.report["baseline"]["outcomes"]
    bad = {name for name, outcome in outcomes.items() if outcome not in ("passed", "skipped", "xfailed")}
    assert bad == {"test_suite.py::test_fails_always"}
    assert len(outcomes) == 17


@pytest.mark.ci
def test_table_counts_compared_tests(everything: Run) -> None:
    header, row = next(
        (line.split(), row.split())
        for line, row in zip(everything.lines, everything.lines[2:], strict=False)
        if line.startswith("file ")
    )
    assert header[0] == "file"
    # Not compared: a test that always fails, one always skipped, one skipped in the mode, and an unstable one.
    assert row == ["test_suite.py", *map(str, (17, 15, 13, 4, 9, 1, 0, 1))]


@pytest.mark.ci
def test_report_has_the_error_report_of_pytest(everything: Run) -> None:
    difference = everything.report["modes"]["installed"]["differences"]["test_suite.py::test_one_of_two[2]"]
    assert difference["outcome"] == "failed"
    assert difference["error"] == "AssertionError: not 2"
    assert "def test_one_of_two(i)" in difference["text"]


@pytest.mark.ci
def test_suite_that_passes_in_its_modes_has_exit_code_zero(tmp_path: Path) -> None:
    modes = ("deferred", "fake")
    tests = [f"test_suite.py::test_{name}" for name in ("values_and_random_numbers", "fake_tensor_mode_makes_fakes")]
    result = run(tmp_path, MODES, f"--torchext={','.join(modes)}", "--torchext-reruns=0", *tests)
    assert result.exit_code == 0, result.process.stdout
    assert {mode: report["compared"] for mode, report in result.report["modes"].items()} == dict.fromkeys(modes, 2)


@pytest.mark.ci
def test_x_stops_at_the_first_difference(tmp_path: Path) -> None:
    result = run(
        tmp_path, SUITE, "--torchext=installed", "--torchext-reruns=0", "-x", "-k", "fails_always or only or one_of_two"
    )
    assert result.section("different:") == [
        "test_suite.py::test_passes_without_torchext_only: failed: AssertionError: torchext is here"
    ]
    assert result.report["modes"]["installed"]["compared"] == 1


CRASHES = """
import os, sys
HAS_TORCHEXT = "torchext" in sys.modules
def test_a():
    if HAS_TORCHEXT: os.abort()
def test_b(): assert not HAS_TORCHEXT
def test_c():
    if HAS_TORCHEXT: os._exit(0)
def test_d(): assert not HAS_TORCHEXT
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("argument", "different"),
    [
        pytest.param("-x", ["a"], marks=pytest.mark.long),
        pytest.param("--maxfail=2", ["a", "b"], marks=pytest.mark.long),
        ("--maxfail=3", ["a", "b", "c"]),
        pytest.param("--maxfail=4", ["a", "b", "c", "d"], marks=pytest.mark.long),
    ],
)
def test_maxfail_counts_crashes_and_failures_of_earlier_processes(
    tmp_path: Path, argument: str, different: list[str]
) -> None:
    result = run(tmp_path, CRASHES, "--torchext=installed", "--torchext-reruns=0", argument)
    report = result.report["modes"]["installed"]
    assert list(report["differences"]) == [f"test_suite.py::test_{name}" for name in different]
    assert report["compared"] == len(different)


HANGS = """
import sys, time
import pytest
HAS_TORCHEXT = "torchext" in sys.modules
def test_hangs():
    if HAS_TORCHEXT: time.sleep(1000)
@pytest.fixture
def hangs():
    yield
    if HAS_TORCHEXT: time.sleep(1000)
def test_fails_and_its_fixture_hangs(hangs): assert not HAS_TORCHEXT
def test_after_these(): pass
"""


@pytest.mark.parametrize(
    "ini",
    [
        pytest.param("[pytest]", id="", marks=pytest.mark.long),
        pytest.param("[pytest]\nfaulthandler_timeout = 900", id="faulthandler_timeout", marks=pytest.mark.long),
    ],
)
def test_test_that_hangs_is_ended_when_pytest_uses_the_timer_too(tmp_path: Path, ini: str) -> None:
    (tmp_path / "pytest.ini").write_text(ini)
    result = run(tmp_path, HANGS, "--torchext=installed", "--torchext-reruns=0", "--torchext-timeout=5")
    assert result.report["modes"]["installed"]["outcomes"] == {
        "test_suite.py::test_hangs": "timed out",
        "test_suite.py::test_fails_and_its_fixture_hangs": "timed out",
        "test_suite.py::test_after_these": "passed",
    }


@pytest.mark.ci
@pytest.mark.parametrize(
    "workers", [pytest.param((), id="", marks=pytest.mark.long), pytest.param(("-n1",), id="xdist")]
)
def test_suite_runs_when_the_folder_of_a_script_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: tuple[str, ...]
) -> None:
    if workers:
        pytest.importorskip("xdist")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    result = run(tmp_path, "def test_a(): pass", "--torchext=installed", *workers)
    assert result.exit_code == 0
    assert result.report["modes"]["installed"]["outcomes"] == {"test_suite.py::test_a": "passed"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("suite", "exit_code", "message"),
    [
        ("import not_there", 5, "no test was collected, so nothing was compared"),
        ("def test_a(): assert False", 1, "no test passed without torchext, so nothing was compared"),
        ("import os\ndef test_a(): os.abort()", 1, "no test passed without torchext, so nothing was compared"),
    ],
    ids=["collection error", "failure", "crash"],
)
def test_exit_code_is_not_zero_when_nothing_passes_in_the_baseline(
    tmp_path: Path, suite: str, exit_code: int, message: str
) -> None:
    result = run(tmp_path, suite, "--torchext=installed")
    assert result.exit_code == exit_code
    assert f"== torchext: {message} ==" in result.process.stdout
    assert result.report["modes"] == {}


@pytest.mark.parametrize(
    ("module", "is_replaced"),
    [("torchextras", True), ("torchext_tests.a", True), ("torchext", False), ("torchext.amp", False)],
)
def test_names_are_replaced_in_all_modules_but_those_of_torchext(
    monkeypatch: pytest.MonkeyPatch, module: str, is_replaced: bool
) -> None:
    original, replacement = object(), object()
    user = ModuleType(module)
    user.__dict__["name"] = original
    monkeypatch.setitem(sys.modules, module, user)
    replace_everywhere(original, replacement)
    assert user.__dict__["name"] is (replacement if is_replaced else original)


@pytest.mark.ci
def test_workers_of_xdist_are_in_the_mode_and_may_crash(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    result = run(tmp_path, SUITE, "--torchext=installed", "--torchext-reruns=0", "-n1", "-k", "aborts or one_of_two")
    different = result.report["modes"]["installed"]["differences"]
    assert {name: each["outcome"] for name, each in different.items()} == {
        "test_suite.py::test_aborts_with_torchext": "crashed",
        "test_suite.py::test_one_of_two[2]": "failed",
    }


@pytest.mark.ci
def test_file_that_cannot_be_collected_in_a_mode_is_a_difference_for_each_of_its_tests(tmp_path: Path) -> None:
    suite = "import sys\nif 'torchext' in sys.modules: raise RuntimeError('not here')\ndef test_a(): pass\n"
    (tmp_path / "test_other.py").write_text("def test_b(): pass\n")
    result = run(tmp_path, suite, "--torchext=installed", "--torchext-reruns=0")
    assert result.section("different:") == ["test_suite.py::test_a: error: RuntimeError: not here"]
    assert result.report["modes"]["installed"]["outcomes"] == {"test_other.py::test_b": "passed"}


@pytest.mark.ci
def test_file_that_cannot_be_collected_is_reported_and_the_others_are_compared(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text("def test_b(): pass\n")
    result = run(tmp_path, "import not_there\n", "--torchext=installed")
    assert result.exit_code == 0
    assert "  not collected: test_suite.py: ModuleNotFoundError: No module named 'not_there'" in result.lines
    assert result.report["modes"]["installed"]["compared"] == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["--torchext=nonsense"], 4, "unknown mode 'nonsense', expected one of installed, deferred, "),
        (["--torchext=installed", "--no-such-option"], 4, "unrecognized arguments: --no-such-option"),
        (["--torchext=installed", "test_suite.py::test_not_there"], 4, "not found: "),
        (["--torchext=installed", "-k", "nothing"], 5, "17 deselected"),
        (["--torchext=installed", "--collect-only", "-q"], 0, "test_suite.py::test_passes"),
        (["--help"], 0, "--torchext-report=FILE"),
        (["-k", "test_fails_always"], 1, "1 failed, 16 deselected"),
    ],
    ids=["mode", "option", "node id", "nothing to do", "collect-only", "help", "no mode"],
)
def test_exit_code_is_that_of_pytest_when_nothing_can_be_compared(
    tmp_path: Path, arguments: list[str], exit_code: int, message: str
) -> None:
    result = run(tmp_path, SUITE, *arguments)
    assert result.exit_code == exit_code
    assert message in result.process.stdout + result.process.stderr


MODES = """
import sys

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class IsDeferred(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.was_deferred = "DeferredInit" in str(torch._C._dispatch_keys(self.weight))


def test_values_and_random_numbers():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    values = torch.rand(3)
    torch.manual_seed(0)
    assert torch.equal(torch.empty(3, 3).uniform_(-(1 / 3) ** 0.5, (1 / 3) ** 0.5), model.weight)
    torch.empty(3).uniform_()
    assert torch.equal(torch.empty(3).uniform_(), values)
    assert not IsDeferred().weight.isnan().any()


def test_module_is_constructed_now(): assert not IsDeferred().was_deferred
def test_factory_is_a_builtin(): assert type(torch.ones) is type(torch.mm)
def test_constructor_is_the_one_of_the_class(): assert not hasattr(nn.Linear.__init__, "__wrapped__")
def test_scripted_factory(): assert torch.jit.script(scripted)().sum() == 2
def scripted(): return torch.ones(2)
def test_inference_mode_is_of_torch(): assert torch.inference_mode.__module__ == "torch.autograd.grad_mode"
def test_inference_mode():
    with torch.inference_mode():
        assert torch.ones(1).is_inference()
def test_autocast_has_no_region():
    with torch.autocast("cpu") as autocast:
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16
    assert not [name for name in vars(autocast) if "torchext" in name]
def test_fake_tensor_mode_has_a_cache():
    with FakeTensorMode() as mode:
        assert isinstance(torch.ones(2), FakeTensor)
        assert mode.cache_enabled
def test_fake_tensor_mode_makes_fakes():
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2)) + 1
    assert isinstance(fake, FakeTensor)
    assert not isinstance(torch.ones(2), FakeTensor)
"""


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> Run:
    suite = tmp_path_factory.mktemp("suite")
    return run(suite, MODES, "--torchext=deferred,deferred-factories,inference,autocast,fake", "--torchext-reruns=0")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "different", "by_replacing"),
    [
        ("deferred", ["module_is_constructed_now"], ["constructor_is_the_one_of_the_class"]),
        (
            "deferred-factories",
            ["module_is_constructed_now"],
            ["constructor_is_the_one_of_the_class", "factory_is_a_builtin"],
        ),
        ("inference", ["inference_mode_is_of_torch"], []),
        ("autocast", ["autocast_has_no_region"], []),
        ("fake", ["fake_tensor_mode_has_a_cache"], []),
    ],
)
def test_mode_replaces_only_the_documented_functions(
    modes: Run, mode: str, different: list[str], by_replacing: list[str]
) -> None:
    report = modes.report["modes"][mode]
    assert set(report["differences"]) == {f"test_suite.py::test_{name}" for name in different}
    assert set(report["by_replacing"]) == {f"test_suite.py::test_{name}" for name in by_replacing}
    assert not report["trouble"]


class TestEntryPoint:
    """pytest loads the plugin without `-p` where torchext is installed."""

    def run(self, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        with (ROOT / "pyproject.toml").open() as file:
            [entry] = [line.strip() for line in file if line.startswith('"torchext.testing.plugin" = ')]
        installed = folder / "installed" / "torchext-0.dist-info"
        installed.mkdir(parents=True)
        (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: torchext\nVersion: 0\n")
        (installed / "entry_points.txt").write_text("[pytest11]\n" + entry.replace('"', ""))
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(installed.parent)])},
            capture_output=True,
            text=True,
            check=False,
        )

    @pytest.mark.ci
    def test_imports_neither_torch_nor_torchext(self, tmp_path: Path) -> None:
        (tmp_path / "test_it.py").write_text(
            "import sys\ndef test(): assert not {'torch', 'torchext'} & sys.modules.keys()"
        )
        ended = self.run(tmp_path, "test_it.py")
        assert ended.returncode == 0, ended.stdout

    @pytest.mark.ci
    def test_runs_the_suite_if_it_is_asked_to(self, tmp_path: Path) -> None:
        (tmp_path / "test_it.py").write_text("import sys\ndef test(): assert 'torchext' not in sys.modules")
        ended = self.run(tmp_path, "--torchext=installed", "test_it.py", "-n1")  # workers load entry points as well
        assert ended.returncode == 1, ended.stdout + ended.stderr
        assert "the suite without torchext" in ended.stdout


# ---- The fixture assert_fits, which pytest finds if torchext is installed


assert_fits = torchext_pytest.assert_fits


class TestAssertFits:
    def test_returns_the_memory_of_a_program_that_fits(self, assert_fits: Callable[..., Fit]) -> None:
        fit = assert_fits(lambda: nn.Linear(2**13, 2**13, device="cuda"), "L4", headroom="20GiB")
        assert fit.peak_allocated == 4 * 2**13 * (2**13 + 1)

    def test_fails_with_the_tables_of_memory(self, assert_fits: Callable[..., Fit]) -> None:
        with pytest.raises(
            AssertionError, match=r"does not fit(.|\n)*Tried to allocate 4\.00 GiB(.|\n)*Largest tensors"
        ):
            assert_fits(
                lambda: [torch.empty(size, device="cuda") for size in (2**20, 2**30)], FakeGPU("mine", memory="1GiB")
            )

    def test_fails_without_the_headroom(self, assert_fits: Callable[..., Fit]) -> None:
        with pytest.raises(AssertionError, match=r"A headroom of 22\.00 GiB was expected, got 21\.54 GiB"):
            assert_fits(lambda: torch.empty(2**27, device="cuda"), "L4", headroom="22GiB")

    def test_fails_if_the_gpu_stays_empty(self, assert_fits: Callable[..., Fit]) -> None:
        with pytest.raises(AssertionError, match='allocated no memory on NVIDIA L4. Construct the model on "cuda"'):
            assert_fits(lambda: nn.Linear(4, 4), "L4")

    def test_raises_the_errors_of_the_program(self, assert_fits: Callable[..., Fit]) -> None:
        with pytest.raises(ZeroDivisionError):
            assert_fits(lambda: 1 // 0)
