"""Options and skips of the whole suite."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import cpu_times
import forked
import hypothesis
import proof_table
import pytest
import tiers
import torch
from fixed_costs import cut_fixed_costs
from foreign_fakes import compile_and_load

PROGRAMS_A_TEST = 5000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--programs",
        type=int,
        default=0,
        help="how many random programs to try beside the usual ones (`make fuzz`)",
    )
    parser.addoption("--fuzz-seed", type=int, default=0, help="where the seeds of these programs begin")
    parser.addoption("--fuzz-device", default="cpu", help="where these programs compute, such as cuda")
    parser.addoption(
        "--foreign-fakes", action="store_true", help="put another owner on the `Fake` key first: foreign_fakes.py"
    )
    cpu_times.pytest_addoption(parser)
    parser.addoption(
        "--proof-table",
        action="store_true",
        help="print the passed tests as rows of the table in docs/reference/proof.md (`make gpu`)",
    )
    tiers.pytest_addoption(parser)


def pytest_configure(config: pytest.Config) -> None:
    tiers.pytest_configure(config)
    os.environ["TORCHEXT_CHECK_LOCKS"] = "1"  # also for processes that tests start
    os.environ["TORCHEXT_CHECK_PLANS"] = "1"
    os.environ["TORCHEXT_FUZZ_DEVICE"] = config.getoption("--fuzz-device")
    if config.getoption("--foreign-fakes"):
        with TemporaryDirectory() as folder:
            compile_and_load(Path(folder))
    hypothesis.settings.register_profile(
        "everyday",
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        max_examples=tiers.amount(200, 2000),
        derandomize=True,
        database=None,
    )
    hypothesis.settings.load_profile("everyday")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Split the programs of `--programs` over tests that may run in parallel. Each run has its own seeds."""
    if "fuzz_seed" not in metafunc.fixturenames:
        return
    programs, first = metafunc.config.getoption("--programs"), metafunc.config.getoption("--fuzz-seed")
    counts = [min(PROGRAMS_A_TEST, programs - done) for done in range(0, programs, PROGRAMS_A_TEST)]
    cases = [(first + number, count) for number, count in enumerate(counts)]
    metafunc.parametrize(("fuzz_seed", "fuzz_count"), cases, ids=[str(seed) for seed, _ in cases])


pytest_report_header = tiers.pytest_report_header
pytest_pycollect_makeitem = tiers.pytest_pycollect_makeitem
pytest_collection_modifyitems = tiers.pytest_collection_modifyitems


def pytest_collection_finish() -> None:
    cut_fixed_costs()


pytest_sessionstart = cpu_times.pytest_sessionstart
pytest_runtest_makereport = cpu_times.pytest_runtest_makereport
pytest_runtest_logreport = cpu_times.pytest_runtest_logreport


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    cpu_times.pytest_terminal_summary(terminalreporter, exitstatus, config)
    proof_table.pytest_terminal_summary(terminalreporter, config)


def pytest_unconfigure() -> None:
    forked.end_servers()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _checked_hits(pytestconfig: pytest.Config) -> Iterator[None]:
    """Check a part of the hits in the cache of metadata: NOTE [Checking hits]."""
    from torchext import _C

    is_sweep = pytestconfig.getoption("--long") or pytestconfig.getoption("--programs") > 0
    _C.check_hits(0.2 if is_sweep else 0.02)
    yield
    assert _C.take_wrong_hits() == 0


@pytest.fixture(scope="module")
def frozen_past() -> None:
    """Exclude existing objects from garbage collection, for files whose tests collect repeatedly."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of ranks and launchers, instead of starting interpreters: `forked.py`."""
    if not forked.CAN_FORK:
        return
    start = partial(forked.ForkedProcess, imports=forked.DRY_RUN)
    replaced = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    monkeypatch.setattr("torchext.dry_run.ranks.processes.subprocess", replaced)


@pytest.fixture
def empty_devices() -> None:
    """Free memory of other tests on fake CUDA devices, for tests that measure it."""
    from torchext import _C
    from torchext.fake import fake_mode

    with fake_mode(gpu=64):
        if not any(torch.cuda.memory_allocated(i) for i in range(64)):
            return
    gc.unfreeze()  # objects excluded by `frozen_past`
    gc.collect()
    # FSDP1's flat parameters are in cycles through autograd nodes, which are never collected.
    for left in gc.get_objects():
        # `isinstance()` would read `__class__`, which warns for deprecated PyTorch objects.
        is_tensor = issubclass(type(left), torch.Tensor)
        if is_tensor and _C.is_fake(left) and left.is_cuda and left.layout is torch.strided:
            left.untyped_storage().resize_(0)
    gc.freeze()
