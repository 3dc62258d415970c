"""`summary(time=)` reports the duration of materializing by module and by operator, without side effects."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from torch import nn

from torchext.deferred_init import Summary, deferred_init, is_deferred, materialize_module, summary
from torchext.fake import fake_mode


class Model(nn.Module):
    """Writes one weight twice, computes one, and ties one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.inner = nn.Linear(64, 64)
        self.head = nn.Linear(64, 100, bias=False)
        nn.init.normal_(self.inner.weight)
        nn.init.orthogonal_(self.head.weight)
        self.embedding.weight = self.head.weight


def tables(found: Summary) -> list[list[list[str]]]:
    """Return the tables of a summary as lists of rows of words, without the lines below the headers."""
    return [
        [re.split(r"  +", line.strip()) for place, line in enumerate(table.splitlines()) if place != 1]
        for table in str(found).split("\n\n")
    ]


def test_summary_without_times_has_one_table() -> None:
    assert len(tables(summary(deferred_init(Model)))) == 1


def test_measured_summary_has_a_time_for_each_module_and_operator() -> None:
    modules, operators = tables(summary(deferred_init(Model), time=True))
    assert modules[0][-2:] == ["predicted", "measured"]
    assert [row[0] for row in modules[1:]] == ["embedding", "inner", "head", "total"]
    assert [row[0] for row in operators[1:]] == [
        row[0] for row in sorted(operators[1:], key=lambda row: -float(row[-1].removesuffix(" ms")))
    ]
    for row in modules[1:] + operators[1:]:
        assert all(re.fullmatch(r"[\d,]+\.\d ms", cell) for cell in row[-2:]), row


def test_operators_are_those_that_run() -> None:
    _, operators = tables(summary(deferred_init(Model), time=True))
    calls = {row[0]: int(row[1]) for row in operators[1:]}
    assert calls["aten::normal_"] == 2  # of the inner weight, and of the matrix that is made orthogonal
    assert calls["aten::uniform_"] == 1  # of the inner bias: the weights are overwritten
    assert calls["aten::linalg_qr"] == 1


def test_bytes_of_operators_are_those_that_they_write() -> None:
    def build() -> nn.Module:
        module = nn.Linear(64, 64, bias=False)
        with torch.no_grad():
            module.weight[:16].zero_()
        return module

    _, operators = tables(summary(deferred_init(build), time="predicted"))
    assert {row[0]: row[2] for row in operators[1:]} == {"aten::uniform_": "16.00 KiB", "aten::zero_": "4.00 KiB"}


def test_prediction_runs_nothing() -> None:
    def build() -> nn.Module:
        module = nn.Linear(2, 2)
        with torch.no_grad():
            module.weight.copy_(torch.ones(2, 2).index_select(0, torch.arange(2).add_(7)))  # raises when it runs
        return module

    module = deferred_init(build)
    modules, operators = tables(summary(module, time="predicted"))
    assert all(row[-1].endswith(" ms") and "ms" not in row[-2] for row in modules[1:] + operators[1:])
    with pytest.raises(IndexError, match="out of range"):
        summary(module, time=True)
    assert is_deferred(module.weight)


def test_measuring_changes_neither_the_module_nor_random_states() -> None:
    torch.manual_seed(4)
    eager = Model()
    torch.manual_seed(4)
    module = deferred_init(Model)
    state = torch.get_rng_state()
    assert summary(module, time=True) != summary(module)
    assert is_deferred(module.inner.weight)
    assert torch.equal(torch.get_rng_state(), state)
    materialize_module(module)
    assert torch.equal(torch.get_rng_state(), state)
    for actual, expected in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(actual, expected)


def test_real_tensors_take_no_time() -> None:
    module = deferred_init(Model)
    materialize_module(module.inner)
    (modules, operators) = tables(summary(module, time=True))
    assert "ms" not in modules[2][-1]
    assert "aten::uniform_" not in {row[0] for row in operators}
    assert len(tables(summary(nn.Linear(2, 2), time=True))) == 1


def test_lazy_and_sparse_tensors_are_described() -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.LazyLinear(3), nn.Linear(2, 2))
        module.register_buffer("sparse", torch.eye(3).to_sparse())
        return module

    modules, _ = tables(summary(deferred_init(build), time=True))
    assert [row[0] for row in modules[1:]] == ["(self)", "0", "1", "total"]


def test_time_on_a_missing_device_is_only_predicted() -> None:
    with fake_mode(gpu=1):
        module = deferred_init(lambda: nn.Linear(2, 2, device="cuda"))
        assert "aten::uniform_" in str(summary(module, time="predicted"))
        with pytest.raises(RuntimeError, match=r"`aten::uniform_` was recorded on cuda:0, but this machine has no"):
            summary(module, time=True)


def test_measured_operators_are_those_that_materializing_runs() -> None:
    """An operator does not run within the preceding fill if its argument is a tensor of the module."""

    def build() -> nn.ParameterList:
        first = nn.Parameter(torch.randn(2**21) * 2)
        return nn.ParameterList([first, nn.Parameter((first.detach() * 3).exp())])

    module = deferred_init(build)
    materialize_module(module)
    _, operators = tables(summary(deferred_init(build), time=True))
    [multiplied] = [row for row in operators if row[0] == "aten::mul.Tensor"]
    assert multiplied[1] == "2"
    assert float(multiplied[-1].removesuffix(" ms")) > 0


@pytest.mark.parametrize("time", ["measured", 1, 2, None])
def test_other_values_are_refused(time: object) -> None:
    with pytest.raises(ValueError, match=r'summary\(\) takes False, True or "predicted" as `time`'):
        summary(nn.Linear(2, 2), time=time)


@pytest.mark.ci
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_measuring_takes_the_memory_of_the_largest_tensor() -> None:
    code = """
import resource, torch
from torch import nn
from torchext.deferred_init import Summary, deferred_init, summary
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def build(count): return nn.ParameterList(torch.empty(2048, 2048).normal_() for _ in range(count))
summary(deferred_init(build, 1), time=True)
before = peak()
summary(deferred_init(build, 20), time=True)
print(peak() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 60  # MiB; the parameters have 320
