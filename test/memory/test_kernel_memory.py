"""Allocations of kernels besides their results, compared with those recorded in a CUDA build."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from torch import Tensor

from torchext import _C
from torchext.fake import FakeGPU, fake_mode

pytestmark = pytest.mark.usefixtures("empty_devices")

# Written by test/oracle/record_kernels.py on PyTorch 2.15 (with equal results on 2.14 for its operators). The first
# part of a line names the operator.
TRACES = Path(__file__).with_name("kernel_traces.jsonl").read_text().splitlines()
OPERATORS = sorted({json.loads(line)["op"] for line in TRACES})

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
FREES_WORKSPACES = RELEASE >= (2, 15)

MIB = 2**20


def decode(value: Any) -> Any:
    """Return an argument from its encoding by record_kernels.py."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "t" in value:
        return decode_tensor(value)
    if "float" in value:
        return float(value["float"])
    if "device" in value:
        return torch.device(value["device"])
    return getattr(torch, next(iter(value.values())))


def decode_tensor(value: dict[str, Any]) -> Tensor:
    """Return a tensor with these metadata."""
    options = {"dtype": getattr(torch, value["t"]), "device": value.get("d", "cuda")}
    sizes, offset = value["s"], value.get("o", 0)
    if "st" not in value and not offset:
        return torch.empty(sizes, **options)
    strides = value.get("st") or torch.empty(sizes, device="meta").stride()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return torch.empty(offset + extent, **options).as_strided(sizes, strides, offset)


def steps_of(op: str, arguments: Sequence[Any], results: Sequence[Any], *, named: Sequence[str] = ("R0",)) -> str:
    """Return the rule's steps of a call in the format of record_kernels.py. `named` are the allocated results."""
    name, _, overload = op.partition(".")
    before, after = _C.kernel_memory(name, overload, tuple(arguments), tuple(results))
    explicit = {number for what, number, _ in before + after if what == "result"}
    between = [("result", int(name[1:]), 0) for name in sorted(named) if int(name[1:]) not in explicit]
    written: list[str] = []
    numbers: dict[int, int] = {}
    alive: list[int] = []
    for what, number, size in [*before, *between, *after]:
        if what == "allocate":
            numbers[number] = len(numbers)
            alive.append(number)
            written.append(f"A{numbers[number]}:{size}")
        elif what == "free":
            alive.remove(number)
            written.append(f"F{numbers[number]}")
        elif what == "workspace":
            written.append(f"W{number}:{size}")
        elif f"R{number}" in named:
            written.append(f"R{number}")
    return " ".join(written + [f"F{numbers[number]}" for number in alive])


def without_workspaces(steps: str) -> str:
    """Return the steps without persistent workspaces, which already existed."""
    return " ".join(step for step in steps.split() if not step.startswith("W"))


def mismatches(lines: Sequence[str]) -> Iterator[str]:
    """Return the calls for which the rule differs from the recording."""
    for line in lines:
        call = json.loads(line)
        named = [step for step in call["steps"].split() if step.startswith("R")]
        found = steps_of(call["op"], decode(call["args"]), decode(call["results"]), named=named)
        if without_workspaces(found) != call["steps"]:
            yield f"{line}\n  the rule says {found!r}"


@pytest.fixture
def cuda() -> Iterator[None]:
    with fake_mode(gpu=FakeGPU("H100-80GB")), torch.backends.cudnn.flags(enabled=False):
        yield


class TestTraces:
    """cuBLAS kept its workspace in the recorded calls; see the next class."""

    @pytest.mark.skipif(FREES_WORKSPACES, reason="since 2.15 only a variable of the environment has workspaces kept")
    @pytest.mark.parametrize("op", OPERATORS)
    def test_rules_match_recorded_allocations(self, cuda: None, op: str) -> None:
        lines = [line for line in TRACES if json.loads(line)["op"] == op]
        assert list(mismatches(lines)) == []

    @pytest.mark.skipif(not FREES_WORKSPACES, reason="before 2.15 workspaces are always kept")
    def test_rules_match_recorded_allocations_with_persistent_workspaces(self) -> None:
        program = (
            "import torch\n"
            "from torchext.fake import FakeGPU, fake_mode\n"
            "from test_kernel_memory import TRACES, mismatches\n"
            "with fake_mode(gpu=FakeGPU('H100-80GB')), torch.backends.cudnn.flags(enabled=False):\n"
            "    print(*mismatches(TRACES), sep='\\n', end='')\n"
        )
        assert run(program, TORCH_CUBLAS_WORKSPACE_CACHE="1") == ""


def run(program: str, **variables: str) -> str:
    """Return the output of a new process with these environment variables."""
    here = os.fspath(Path(__file__).parent)
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}
    return forked.run([sys.executable, "-c", program], env=environment, check=True).stdout


def workspaces_of(op: str, arguments: Sequence[Any], results: Sequence[Any]) -> list[str]:
    """Return the workspace steps of a call: before 2.15 the persistent ones, and since then the allocations."""
    return [re.sub(r"^A\d+", "A", step) for step in steps_of(op, arguments, results).split() if step[0] in "WA"]


class TestWorkspaces:
    """Follows `getCurrentCUDABlasHandle()` and `getCUDABlasLtWorkspace()` in CublasHandlePool.cpp."""

    def test_products_need_the_workspace_of_the_device(self, cuda: None) -> None:
        a = torch.empty(8, 8, device="cuda")
        expected = f"A:{32 * MIB}" if FREES_WORKSPACES else f"W0:{32 * MIB}"
        assert workspaces_of("aten::mm", [a, a], [a]) == [expected]

    def test_a_device_of_before_hopper_has_a_smaller_one(self) -> None:
        with fake_mode(gpu=FakeGPU("A100-80GB")):
            a = torch.empty(8, 8, device="cuda")
            (step,) = workspaces_of("aten::mm", [a, a], [a])
        assert step.partition(":")[2] == str(8519680)

    @pytest.mark.skipif(not FREES_WORKSPACES, reason="before 2.15 both libraries share a workspace")
    @pytest.mark.parametrize(
        ("bias", "beta", "dtype", "size"),
        [
            ((8,), 1, torch.float32, MIB),
            ((1, 8), 1, torch.float32, MIB),
            ((8,), 0.5, torch.float32, 32 * MIB),
            ((8, 8), 1, torch.float32, 32 * MIB),
            ((8, 8), 0.5, torch.bfloat16, MIB),
            ((8, 1), 1, torch.bfloat16, 32 * MIB),
            ((1,), 1, torch.bfloat16, 32 * MIB),
        ],
    )
    def test_a_bias_is_added_by_cublaslt(
        self, cuda: None, bias: tuple[int, ...], beta: float, dtype: torch.dtype, size: int
    ) -> None:
        a = torch.empty(8, 8, device="cuda", dtype=dtype)
        vector = torch.empty(bias, device="cuda", dtype=dtype)
        assert workspaces_of("aten::addmm", [vector, a, a, beta, 1], [a]) == [f"A:{size}"]

    @pytest.mark.cases(2)
    @pytest.mark.parametrize(
        ("variables", "size"),
        [
            ({"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}, 8519680),
            ({"CUBLAS_WORKSPACE_CONFIG": ":16:4"}, 65536),
            ({"CUBLAS_WORKSPACE_CONFIG": "much"}, 32 * MIB),
            ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, 0),
        ],
        ids=["two_pools", "one_pool", "nonsense", "none"],
    )
    def test_the_environment_decides_the_size(self, variables: dict[str, str], size: int) -> None:
        program = (
            "import torch\n"
            "from torchext import _C\n"
            "from torchext.fake import fake_mode\n"
            "with fake_mode(gpu=True):\n"
            "    a = torch.empty(8, 8, device='cuda')\n"
            "    print([step[2] for step in _C.kernel_memory('aten::mm', '', (a, a), (a,))[1] if step[2]])\n"
        )
        assert run(program, **variables).strip() == str([size] if size else [])

    @pytest.mark.skipif(FREES_WORKSPACES, reason="since 2.15 workspaces are freed")
    def test_forward_and_backward_passes_keep_one_each(self) -> None:
        with fake_mode(gpu=True):
            a = torch.empty(8, 8, device="cuda", requires_grad=True)
            before = torch.cuda.memory_allocated()
            product = a @ a
            assert torch.cuda.memory_allocated() == before + 32 * MIB + 512
            a @ a
            assert torch.cuda.memory_allocated() == before + 32 * MIB + 512
            product.sum().backward()
            a.grad = None
            del product
            assert torch.cuda.memory_allocated() == before + 64 * MIB

    @pytest.mark.skipif(FREES_WORKSPACES, reason="since 2.15 workspaces are freed")
    def test_kept_workspaces_do_not_outlive_their_devices(self) -> None:
        for _ in range(2):
            with fake_mode(gpu=True):
                assert torch.cuda.memory_allocated() == 0
                a = torch.empty(8, 8, device="cuda")
                a @ a
                assert torch.cuda.memory_allocated() == 32 * MIB + 512
                del a

    def test_a_peak_has_the_workspace(self) -> None:
        with fake_mode(gpu=True):
            a = torch.empty(8, 8, device="cuda")
            a @ a
            assert torch.cuda.max_memory_allocated() == 2 * 512 + 32 * MIB
