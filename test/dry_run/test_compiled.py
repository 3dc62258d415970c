"""Programs that call `torch.compile()` on fake GPUs: the compiler runs up to its kernels."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
import torch._dynamo
from oracle.compare import GPU, in_process, release
from torch import Tensor, nn
from torch._inductor import config
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._triton import has_triton
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchext import inspect
from torchext.dry_run import World, world
from torchext.fake import fake_mode, is_fake
from torchext.fake.cuda import compiler
from torchext.memory import fits, track_memory

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA, where nothing is replaced"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # also in real compilation
]
MIB = 2**20


@pytest.fixture(autouse=True)
def forget_compiled_code(request: pytest.FixtureRequest) -> None:
    torch._dynamo.reset()
    request.getfixturevalue("empty_devices")  # compiled code holds tensors


def peak_of(function: Callable[[Tensor], object], *, compiles: bool) -> int:
    """Return the peak of a call on 4 MiB, above what its argument takes."""
    with world(1, gpu="H100-80GB"):
        call = torch.compile(function) if compiles else function
        x = torch.zeros(MIB, device="cuda")
        call(x)  # compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(x)
        return torch.cuda.max_memory_allocated() - before


def remarks_of(run: Callable[[], object]) -> list[str]:
    with world(1, gpu="H100-80GB") as job:
        run()
    return job.remarks


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(model: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        call(torch.zeros(8, 16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_fused_operators_allocate_only_their_result() -> None:
    def chain(x: Tensor) -> Tensor:
        return ((x.sin() + 1).cos() * 2).exp()

    assert peak_of(chain, compiles=False) == 2 * 4 * MIB
    assert peak_of(chain, compiles=True) == 4 * MIB


@pytest.mark.skipif(not hasattr(config, "wrap_inductor_compiled_regions"), reason="not in this PyTorch")
def test_compiled_code_in_a_selective_checkpoint_is_compiled() -> None:
    with config.patch(wrap_inductor_compiled_regions=True), world(1, gpu="H100-80GB"):
        attend = torch.compile(flex_attention)
        x = torch.zeros(1, 4, 4096, 64, device="cuda", requires_grad=True)
        choose = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        checkpoint(lambda x: attend(x, x, x), x, use_reentrant=False, context_fn=choose).sum().backward()
        assert torch.cuda.max_memory_allocated() < 64 * MIB  # the scores would have 256 MiB


def test_repeated_draws_of_a_checkpoint_need_no_assumed_values() -> None:
    def attend(x: Tensor) -> Tensor:
        query = x.view(1, 8, 16, 64)
        return nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1).view_as(x)

    state = torch.get_rng_state()
    with world(1, gpu="H100-80GB", values="raise"):
        model = nn.Linear(64, 64).cuda()
        train(model, torch.compile(lambda x: checkpoint(lambda x: attend(model(x)), x, use_reentrant=False)))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 0).sum() + x,
        lambda x: torch.full_like(x, 3) * x + torch.zeros(4, device="cuda", dtype=torch.int64) + torch.ones_like(x),
        lambda x: torch.where(x > 0, x, torch.tensor(float("-inf"), device=x.device)) + x.new_tensor(2.0),
        lambda x: x * torch.tensor([1.0] * 9, device="cuda")[:4],
        lambda x: x * torch.ones(4, dtype=torch.bool, device="cuda").to(x.dtype),
    ],
    ids=["product with zero", "factories", "literals", "long literal", "converted"],
)
def test_constants_of_graphs_are_known(function: Callable[[Tensor], Tensor]) -> None:
    with world(1, gpu="H100-80GB", values="raise"):
        torch.compile(function)(torch.ones(4, device="cuda", dtype=torch.int64))


def test_attention_of_dynamic_sizes_is_compiled_once_more() -> None:
    def attend(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    def run() -> None:
        compiled = torch.compile(attend)
        for length in (64, 100, 300, 500):
            compiled(torch.zeros(2, 4, length, 64, device="cuda", dtype=torch.bfloat16))

    (remark,) = remarks_of(run)
    assert remark.startswith("torch.compile() made 2 graphs;")


def test_each_measured_program_is_compiled_for_its_own_sizes() -> None:
    compiled = torch.compile(lambda x: (x.sin() + 1).sum(0) * 2)
    graphs: list[str] = []
    observe = lambda event, place: graphs.append(event)  # noqa: E731
    compiler.compile_observers.append(observe)
    try:
        for size in (64, 128, 256):
            assert fits(partial(lambda size: compiled(torch.zeros(size, MIB, device="cuda")), size), "H100-80GB")
    finally:
        compiler.compile_observers.remove(observe)
    assert graphs == [compiler.GRAPH] * 3, "no code for dynamic sizes"


class TestGuards:
    def test_names_of_arguments_may_contain_global(self) -> None:
        def repeat(x: Tensor, is_global_step: bool = False) -> Tensor:
            return x.repeat(3, 1) if is_global_step else x + 1

        with fake_mode(gpu="H100-80GB"):
            compiled, x = torch.compile(repeat), torch.zeros(2, 8, device="cuda")
            assert [compiled(x, step).shape[0] for step in (False, True)] == [2, 6]

    @pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks:UserWarning")
    @pytest.mark.parametrize("is_tracked", [False, True])
    def test_global_hooks_of_the_program_are_called_each_time(self, is_tracked: bool) -> None:
        calls: list[object] = []
        hook = register_module_forward_hook(lambda module, args, output: calls.append(type(module)))
        try:
            with fake_mode(gpu="H100-80GB"), track_memory() if is_tracked else nullcontext():
                compiled = torch.compile(nn.Linear(8, 8).cuda())
                for i in range(3):
                    calls.append(i)
                    compiled(torch.zeros(2, 8, device="cuda"))
        finally:
            hook.remove()
        assert [call for call in calls if call is nn.Linear or isinstance(call, int)] == [
            *(0, nn.Linear),
            *(1, nn.Linear),
            *(2, nn.Linear),
        ]


class TestRealTensors:
    """Real CPU tensors in compiled code, while there are fake GPUs."""

    def test_graphs_of_real_tensors_compute(self) -> None:
        x, written = torch.arange(4.0), torch.zeros(4)
        with fake_mode(gpu="H100-80GB"):
            assert torch.compile(lambda x: (x * 3) % 5)(x).tolist() == [0, 3, 1, 4]
            torch.compile(lambda x: x.add_(1))(written)
        assert written.tolist() == [1] * 4

    def test_writes_beside_fakes_are_refused(self) -> None:
        written = torch.zeros(4)
        with fake_mode(gpu="H100-80GB"), pytest.raises(RuntimeError, match=r"writes a real CPU tensor of shape \[4\]"):
            torch.compile(lambda c, x: (c.add_(1), c * 2, x + 1))(written, torch.zeros(8, device="cuda"))
        assert written.tolist() == [0] * 4


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_have_the_formats_of_cudnn(kernel: int, memory_format: torch.memory_format) -> None:
    with fake_mode(gpu="H100-80GB"):
        layers = nn.Conv2d(64, 64, kernel), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 32, 3, groups=32)
        model = nn.Sequential(*layers).cuda().to(memory_format=memory_format)
        x = torch.zeros(2, 64, 32, 32, device="cuda", requires_grad=True).contiguous(memory_format=memory_format)
        y = torch.compile(model)(x)
        y.sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last) == (memory_format is torch.channels_last)


def test_answers_to_other_threads_are_not_those_of_this_one() -> None:
    with fake_mode(gpu="H100-80GB"):
        thread = Thread(target=has_triton)  # which has no devices
        thread.start()
        thread.join()
        assert is_fake(torch.compile(torch.sin)(torch.zeros(9, device="cuda")))
    assert not has_triton()


@pytest.mark.parametrize("option", ["freezing", "cpp_wrapper", "benchmark_fusion"])
def test_options_that_need_a_gpu_are_left_out_and_named(option: str) -> None:
    def run() -> None:
        with torch.no_grad(), config.patch({option: True}):
            torch.compile(nn.Linear(8, 8).cuda())(torch.zeros(8, 8, device="cuda"))

    (remark,) = remarks_of(run)
    assert f"without {option}" in remark


@pytest.mark.ci
def test_partitioner_recomputes_what_is_cheap() -> None:
    def saved(compiles: bool) -> int:
        with world(1, gpu="H100-80GB"):
            x = torch.zeros(MIB, device="cuda", requires_grad=True)
            call = torch.compile(torch.nn.functional.gelu) if compiles else torch.nn.functional.gelu
            before = torch.cuda.memory_allocated()
            y = (call(x.sin()) + 1).cos()  # noqa: F841 - keeps what is saved
            return torch.cuda.memory_allocated() - before

    assert saved(compiles=True) <= saved(compiles=False)


@pytest.mark.ci
def test_report_has_graphs_breaks_and_recompilations() -> None:
    def broken(x: Tensor) -> Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    def run() -> None:
        call = torch.compile(broken)
        call(torch.zeros(4, 4, device="cuda"))
        call(torch.zeros(4, 8, device="cuda"))

    (text,) = [one for one in remarks_of(run) if one.startswith("torch.compile() made ")]
    assert "made 4 graphs; breaks at " in text
    assert "test_compiled.py:" in text.partition("breaks at ")[2].partition(";")[0]
    assert "compiled again for other arguments at " in text


@pytest.mark.ci
@pytest.mark.parametrize(
    ("mode", "left_out"),
    [
        ("max-autotune", "without CUDA graphs and max-autotune"),
        ("reduce-overhead", "without CUDA graphs"),
        ("max-autotune-no-cudagraphs", "without max-autotune"),
    ],
)
def test_choices_by_measurement_are_left_out_and_named(mode: str, left_out: str) -> None:
    def run() -> None:
        model = Block().cuda()
        train(model, torch.compile(model, mode=mode))

    (text,) = [one for one in remarks_of(run) if one.startswith("torch.compile() made ")]
    assert f"{left_out}." in text


def test_tensors_of_compiled_code_have_categories_and_the_lines_that_they_stand_for() -> None:
    with fake_mode(gpu="H100-80GB"), track_memory(trace=True) as memory:
        model = nn.Sequential(Block(256), Block(256)).cuda()
        call = torch.compile(model)
        loss = call(torch.zeros(64, 64, 256, device="cuda")).square().mean()
        loss.backward()
    categories = {one.label: nbytes for one, nbytes in memory.peak_allocated().by_category.items()}
    assert categories["activations"] > 8 * MIB
    lines = {one.line for one in memory.allocations() if one.category.label == "activations"}
    start = Block.forward.__code__.co_firstlineno
    assert lines == {f"{__file__}:{start + 1} in forward"}


def test_modules_are_compiled_whole_while_memory_is_tracked() -> None:
    events: list[str] = []
    observe = lambda event, place: events.append(event)  # noqa: E731
    compiler.compile_observers.append(observe)
    try:
        with fake_mode(gpu="H100-80GB"), track_memory():
            model = nn.Sequential(Block(), Block()).cuda()
            train(model, torch.compile(model), steps=3)
    finally:
        compiler.compile_observers.remove(observe)
    assert events == [compiler.GRAPH]


@pytest.mark.ci
def test_compiled_optimizer_has_its_state() -> None:
    with world(1, gpu="H100-80GB"):
        model = Block().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        step = torch.compile(optimizer.step)
        for _ in range(2):
            model(torch.zeros(8, 64, device="cuda")).sum().backward()
            step()
        state = optimizer.state[model.up.weight]
        assert is_fake(state["exp_avg"])
        assert state["exp_avg"].is_cuda


@pytest.mark.ci
def test_blocks_of_fsdp_gather_and_reduce_as_eager_ones() -> None:
    from torch.distributed.fsdp import fully_shard

    def run(compiles: bool) -> World:
        with world(8, gpu="H100-80GB") as job:
            model = nn.Sequential(*(Block() for _ in range(3))).cuda()
            for block in model:
                if compiles:
                    block.compile()
                fully_shard(block)
            fully_shard(model)
            train(model, model)
        return job

    compiled, eager = (
        [(one.operator, one.bytes_sent, one.bytes_received) for one in run(compiles).collectives]
        for compiles in (True, False)
    )
    assert compiled == eager


@pytest.mark.ci
def test_flex_attention_is_compiled_with_its_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    with world(1, gpu="H100-80GB"):
        mask = torch.compile(create_block_mask)(lambda b, h, q, k: q >= k, 1, 1, 4096, 4096, device="cuda")
        shape = (2, 4, 4096, 64)
        query, key, value = (torch.zeros(shape, device="cuda", requires_grad=True) for _ in range(3))
        torch.compile(flex_attention)(query, key, value, block_mask=mask).sum().backward()
        assert query.grad is not None
        assert torch.cuda.max_memory_allocated() < 64 * MIB  # the scores would take 512 MiB


@pytest.mark.ci
def test_fits_counts_the_compiled_program() -> None:
    def step() -> None:
        model = nn.Sequential(Block(), Block()).cuda()
        train(model, torch.compile(model))

    found = fits(step, "H100-80GB")
    assert found
    assert found.peak_reserved > 0


@pytest.mark.ci
def test_compiler_works_on_real_tensors_before_between_and_after() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2 + x.sin()

    x = torch.linspace(0, 1, 64)
    expected = double(x)
    call = torch.compile(double)
    assert torch.equal(call(x), expected)
    variables = dict(os.environ)
    with fake_mode(gpu="H100-80GB"):
        y = call(torch.zeros(64, device="cuda"))
        assert is_fake(y)
        assert y.is_cuda
    assert dict(os.environ) == variables
    assert torch.equal(call(x), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(double)(x), expected)


def test_nothing_of_the_compiler_stays_replaced() -> None:
    import torch._inductor.async_compile
    import torch._inductor.compile_fx

    def replaced() -> set[str]:
        names = {one.target for one in inspect.patches() if one.is_installed}
        return {name for name in names if "_inductor" in name or "_dynamo" in name}

    before = replaced()
    with fake_mode(gpu="H100-80GB"):
        torch.compile(lambda x: x + 1)(torch.zeros(8, device="cuda"))
        assert len(replaced() - before) > 8
    assert replaced() <= before | {"torch._inductor.output_code.CompiledFxGraph.__call__"}  # while a fake is alive


@pytest.mark.parametrize(
    ("found", "expected"),
    [(None, "found none: pip install 'triton=="), ("1.0", "found 1.0: pip install 'triton==")],
)
def test_other_releases_of_triton_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, found: str | None, expected: str
) -> None:
    monkeypatch.setattr(compiler, "find_spec", lambda name: found)
    monkeypatch.setattr(compiler, "version", lambda name: found)
    assert expected in compiler.why_not_compiled("inductor")

    def run() -> None:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device="cuda"))

    (text,) = remarks_of(run)
    assert text.startswith("torch.compile() was ignored: ")
    assert expected in text


def test_compilation_can_be_turned_off() -> None:
    with world(1, gpu="H100-80GB", compiles=False) as job:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device="cuda"))
    assert job.remarks[0].startswith("torch.compile() was ignored: ")


def test_other_backends_are_ignored_by_name() -> None:
    (text,) = remarks_of(lambda: torch.compile(lambda x: x + 1, backend="cudagraphs")(torch.zeros(8, device="cuda")))
    assert "the backend 'cudagraphs' generates code for a real GPU" in text


# The peaks of programs in CUDA builds of PyTorch, in three steps: release, GPU, program, bytes allocated and reserved.
# From `python -m oracle.compare --record FILE`.
FACTS = [line.split("\t") for line in Path(__file__).with_name("compiled_facts.tsv").read_text().splitlines()]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("gpu", "program", "peaks"), [(*fact[1:3], fact[3:]) for fact in FACTS if fact[0] == release()]
)
def test_peaks_are_those_of_a_cuda_build(
    gpu: str, program: str, peaks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU, gpu)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    found = in_process(program, is_fake=True)
    assert [*found["allocated"], *found["reserved"]] == [*map(int, peaks)]
