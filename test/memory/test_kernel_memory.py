"""Allocations of kernels besides their results, compared with those recorded in a CUDA build."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from common import RecordFunctions, RecordOperators
from torch import Tensor
from torch._dynamo.utils import counters
from torch._prims_common import suggest_memory_format

from torchext.fake import FakeGPU, fake_mode
from torchext.fake.cuda.kernels import calls
from torchext.fake.cuda.kernels.calls import Geometry, Gpu, KernelCall, contiguous

pytestmark = pytest.mark.usefixtures("empty_devices")

# Written by test/oracle/record_kernels.py on PyTorch 2.15 (with equal results on 2.14 for its operators). The first
# part of a line names the operator.
TRACES = Path(__file__).with_name("kernel_traces.jsonl").read_text().splitlines()
OPERATORS = sorted({json.loads(line)["op"] for line in TRACES})

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
FREES_WORKSPACES = RELEASE >= (2, 15)

MIB = 2**20


H100 = Gpu(major=9, multiprocessors=132, max_threads_per_multiprocessor=2048)
A100 = Gpu(major=8, multiprocessors=108, max_threads_per_multiprocessor=2048)

NAMES = ("allocate", "free", "workspace", "result")
"""The kinds of steps."""


def decode(value: Any) -> Any:
    """Return the description of an argument from its encoding by record_kernels.py."""
    if isinstance(value, list):
        return tuple(map(decode, value))
    if not isinstance(value, dict):
        return value
    if "t" in value:
        dtype = getattr(torch, value["t"])
        strides = value.get("st") or contiguous(value["s"], dtype).strides
        return Geometry(value["s"], strides, dtype, value.get("o", 0))
    return float(value["float"]) if "float" in value else None


def matrix(*sizes: int, dtype: torch.dtype = torch.float32) -> Geometry:
    """Return the description of a contiguous tensor."""
    return contiguous(sizes, dtype)


def steps_of(
    op: str, arguments: Sequence[Any], results: Sequence[Any], *, named: Sequence[str] = ("R0",), gpu: Gpu = H100
) -> str:
    """Return the rule's steps of a call in the format of record_kernels.py. `named` are the allocated results."""
    # The operators without a rule that are recorded show that they need none.
    before, after = calls.steps_of(op, arguments, results, gpu) if op in calls.RULES else ([], [])
    explicit = {number for kind, _, number in before + after if NAMES[kind] == "result"}
    between = [(calls.RESULT, 0, int(name[1:])) for name in sorted(named) if int(name[1:]) not in explicit]
    written: list[str] = []
    for kind, size, number in [*before, *between, *after]:
        if NAMES[kind] == "allocate":
            written.append(f"A{number}:{size}")
        elif NAMES[kind] == "free":
            written.append(f"F{number}")
        elif NAMES[kind] == "workspace":
            written.append(f"W{number}:{size}")
        elif f"R{number}" in named:
            written.append(f"R{number}")
    return " ".join(written)


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
def without_cudnn() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=False):
        yield


class TestTraces:
    """cuBLAS kept its workspace in the recorded calls; see the next class."""

    @pytest.mark.skipif(FREES_WORKSPACES, reason="since 2.15 only a variable of the environment has workspaces kept")
    @pytest.mark.parametrize("op", OPERATORS)
    def test_rules_match_recorded_allocations(self, without_cudnn: None, op: str) -> None:
        lines = [line for line in TRACES if json.loads(line)["op"] == op]
        assert list(mismatches(lines)) == []

    @pytest.mark.skipif(not FREES_WORKSPACES, reason="before 2.15 workspaces are always kept")
    def test_rules_match_recorded_allocations_with_persistent_workspaces(self) -> None:
        program = (
            "import torch\n"
            "from test_kernel_memory import TRACES, mismatches\n"
            "with torch.backends.cudnn.flags(enabled=False):\n"
            "    print(*mismatches(TRACES), sep='\\n', end='')\n"
        )
        assert run(program, TORCH_CUBLAS_WORKSPACE_CACHE="1") == ""


def run(program: str, **variables: str) -> str:
    """Return the output of a new process with these environment variables."""
    here = Path(__file__).parent
    path = os.pathsep.join([os.fspath(here), os.fspath(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | variables | {"PYTHONPATH": path}
    return forked.run([sys.executable, "-c", program], env=environment, check=True).stdout


def workspaces_of(op: str, arguments: Sequence[Any], results: Sequence[Any], gpu: Gpu = H100) -> list[str]:
    """Return the workspace steps of a call: before 2.15 the persistent ones, and since then the allocations."""
    steps = steps_of(op, arguments, results, gpu=gpu).split()
    return [re.sub(r"^A\d+", "A", step) for step in steps if step[0] in "WA"]


class TestWorkspaces:
    """Follows `getCurrentCUDABlasHandle()` and `getCUDABlasLtWorkspace()` in CublasHandlePool.cpp."""

    def test_products_need_the_workspace_of_the_device(self) -> None:
        a = matrix(8, 8)
        expected = f"A:{32 * MIB}" if FREES_WORKSPACES else f"W0:{32 * MIB}"
        assert workspaces_of("aten::mm", [a, a], [a]) == [expected]

    def test_a_device_of_before_hopper_has_a_smaller_one(self) -> None:
        a = matrix(8, 8)
        (step,) = workspaces_of("aten::mm", [a, a], [a], A100)
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
        self, bias: tuple[int, ...], beta: float, dtype: torch.dtype, size: int
    ) -> None:
        a, vector = matrix(8, 8, dtype=dtype), matrix(*bias, dtype=dtype)
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
            "from torchext.fake.cuda.kernels.calls import Gpu, steps_of\n"
            "from torchext.fake.cuda.kernels.calls import contiguous\n"
            "a = contiguous([8, 8], torch.float32)\n"
            "print([step[1] for step in steps_of('aten::mm', [a, a], [a], Gpu(9, 132, 2048))[1] if step[1]])\n"
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


class TestDescriptions:
    """The core describes a call to its rule."""

    @pytest.fixture
    def described(self, monkeypatch: pytest.MonkeyPatch) -> list[KernelCall]:
        """Return the calls of two operators that reach their rules."""
        seen: list[KernelCall] = []
        for op in ("aten::convolution_backward", "aten::_index_put_impl_"):
            monkeypatch.setitem(calls.RULES, op, seen.append)
        return seen

    def test_arguments_and_results_arrive_by_position(self, described: list[KernelCall]) -> None:
        with fake_mode(gpu=FakeGPU("A100-80GB")):
            x = torch.empty(2, 5, 4, 6, device="cuda").transpose(1, 2)
            weight = torch.empty(31, 4, 3, 3, dtype=torch.float32, device="cuda")[1:]
            of_sizes = ([1, 1], [0, 1], [1, 1], False, [0, 0], 1)
            gradient = torch.empty(2, 30, 3, 6, device="cuda")
            torch.ops.aten.convolution_backward(gradient, x, weight, None, *of_sizes, [True, False, False])
        (call,) = described
        assert parts_of(call.tensor(1)) == ((2, 4, 5, 6), (120, 6, 24, 1), torch.float32, 0)
        assert parts_of(call.tensor(2)) == ((30, 4, 3, 3), (36, 9, 3, 1), torch.float32, 36)
        assert call.arguments[3:] == (None, (1, 1), (0, 1), (1, 1), False, (0, 0), 1, (True, False, False))
        assert parts_of(call.result()) == ((2, 4, 5, 6), (120, 30, 6, 1), torch.float32, 0)
        assert call.results[1] is None
        assert call.gpu == A100

    def test_lists_may_have_undefined_tensors(self, described: list[KernelCall]) -> None:
        with fake_mode(gpu=True):
            x, index = torch.empty(4, 5, device="cuda"), torch.empty(3, dtype=torch.int64, device="cuda")
            torch.ops.aten._index_put_impl_(x, [None, index], x[:, :3], True, False)
        first, second = described[0].arguments[1]
        assert first is None
        assert parts_of(second) == ((3,), (1,), torch.int64, 0)
        assert described[0].arguments[3:] == (True, False)


def parts_of(tensor: Geometry) -> tuple[Any, ...]:
    return tensor.sizes, tensor.strides, tensor.dtype, tensor.offset


class TestRunningRules:
    def test_modes_and_tracers_do_not_observe_rules(self) -> None:
        files: set[str] = set()
        with fake_mode(gpu=True), RecordFunctions() as functions, RecordOperators() as operators:
            x = torch.empty(301, 70, device="cuda")
            functions.seen.clear()
            operators.seen.clear()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            sys.settrace(lambda frame, *_: files.add(frame.f_code.co_filename))
            sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
            try:
                torch.sort(x.t())
            finally:
                sys.settrace(None)
                sys.setprofile(None)
            after = torch.cuda.memory_stats()["allocation.all.allocated"]
        assert after == before + 3  # a rule added one to the results
        assert functions.seen == ["t", "sort"]
        assert operators.seen == ["aten.t.default", "aten.sort.default"]
        rules = os.fspath(Path(calls.__file__).parent)
        assert files
        assert not [file for file in files if file.startswith(rules)]

    def test_autograd_threads_and_others_run_rules(self) -> None:
        def step() -> int:
            with fake_mode(gpu=True):
                x = torch.empty(129, 65, device="cuda", requires_grad=True)
                x.softmax(1).sum().backward()
                return torch.cuda.max_memory_allocated()

        with ThreadPoolExecutor(1) as pool:  # threads with devices at the same time share their memory
            assert len({step(), *(task.result() for task in [pool.submit(step) for _ in range(4)])}) == 1

    @pytest.mark.parametrize("values", [torch.uint16, torch.uint64, torch.int8, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("boundaries", [torch.float32, torch.float16])
    def test_searches_take_all_dtypes_that_pytorch_promotes(self, values: torch.dtype, boundaries: torch.dtype) -> None:
        with fake_mode(gpu=True):
            x, y = torch.empty(5, dtype=values, device="cuda"), torch.empty(4, dtype=boundaries, device="cuda")
            assert torch.bucketize(x, y).dtype is torch.int64

    def test_searches_refuse_dtypes_that_pytorch_does_not_promote(self) -> None:
        with fake_mode(gpu=True):
            x, y = torch.empty(5, dtype=torch.uint16, device="cuda"), torch.empty(4, dtype=torch.uint8, device="cuda")
            with pytest.raises(RuntimeError, match="Promotion for uint16"):
                torch.bucketize(x, y)

    def test_dynamo_does_not_compile_rules(self) -> None:
        def step(x: Tensor) -> Tensor:
            try:
                torch._dynamo.graph_break()
                return x.t().sum() + torch.sort(x.t())[0].sum()
            finally:
                pass

        torch._dynamo.reset()
        counters.clear()
        with fake_mode(gpu=True):
            torch.compile(step, backend="eager")(torch.empty(5000, 70, device="cuda"))
        assert counters["frames"]["total"] < 10
        assert not [text for text in counters["graph_break"] if "fake/cuda/kernels" in text]

    def test_error_in_a_rule_is_raised_and_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(call: KernelCall) -> None:
            call.allocate(512)
            raise KeyError("of a rule")

        with fake_mode(gpu=True):
            x = torch.empty(33, 35, device="cuda")
            allocated = torch.cuda.memory_allocated()
            with monkeypatch.context() as patch:
                patch.setitem(calls.RULES, "aten::sort.stable", fail)
                with pytest.raises(KeyError, match="of a rule"):
                    torch.sort(x, stable=True)
            assert torch.cuda.memory_allocated() == allocated
            values, _ = torch.sort(x, stable=True)
            assert torch.cuda.memory_allocated() == allocated + 5120 + 9728
            assert values.shape == (33, 35)

    def test_rules_are_imported_when_memory_is_first_counted(self) -> None:
        program = (
            "import sys, torch\n"
            "from torchext.fake import fake_mode\n"
            "with fake_mode():\n"
            "    torch.empty(2, 2) @ torch.empty(2, 2)\n"
            "print(any('cuda.kernels' in name for name in sys.modules))\n"
            "with fake_mode(gpu=True):\n"
            "    print('torchext.fake.cuda.kernels.blas' in sys.modules)\n"
        )
        assert run(program).split() == ["False", "True"]


def layouts() -> Iterator[Tensor]:
    """Yield tensors with ambiguous and unusual strides."""
    for sizes in (
        (),
        (0,),
        (3,),
        (2, 1),
        (2, 3, 1),
        (2, 1, 1, 1),
        (2, 3, 1, 5),
        (2, 1, 4, 5),
        (1, 3, 4, 5),
        (2, 0, 4, 5),
    ):
        x = torch.empty(sizes, device="meta")
        yield x
        yield x.new_empty([2 * size for size in sizes])[tuple(slice(None, None, 2) for _ in sizes)]
        yield x.new_empty(sizes[::-1]).permute(tuple(range(len(sizes)))[::-1])
        yield x[:1].expand(sizes) if sizes and sizes[0] else x
    for sizes in ((2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 1, 1, 1), (2, 0, 4, 5)):
        yield torch.empty(sizes, device="meta", memory_format=torch.channels_last)
        yield torch.empty((*sizes, 3), device="meta", memory_format=torch.channels_last_3d)
        yield torch.empty(sizes, device="meta", memory_format=torch.channels_last)[..., ::2]


def test_layouts_of_descriptions_are_those_of_tensors() -> None:
    for tensor in layouts():
        geometry = Geometry(tensor.shape, tensor.stride(), tensor.dtype)
        for memory_format in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d):
            assert geometry.is_contiguous(memory_format) == tensor.is_contiguous(memory_format=memory_format)
        assert geometry.is_dense() == torch.ops.aten.is_non_overlapping_and_dense(tensor)
        assert geometry.memory_format() == suggest_memory_format(tensor)
        assert contiguous(tensor.shape, tensor.dtype).strides == [*torch.empty(tensor.shape, device="meta").stride()]
