"""Lower bounds of the time of a step: certain work, streams, collectives, and published measurements."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from torchext.dry_run import TimeBound, World, bound_time, world
from torchext.dry_run.simulated_world import job_of
from torchext.dry_run.time import Run, Wait, least_time
from torchext.dry_run.time.work import crossing_of
from torchext.fake import FakeGPU, PeakRates
from torchext.memory.tracking import counting_flops

RATES = PeakRates(
    float32=1e12, tf32=2e12, float16=4e12, bfloat16=8e12, float8=16e12, memory=1e12, link=1e11, network=1e10, boost=2.0
)
CACHE = 2**20
GPU = FakeGPU("a GPU", memory=2**40, rates=RATES, l2_cache=CACHE)


@pytest.fixture
def job() -> Iterator[World]:
    with world(16, rank=3, gpu=GPU) as made:
        yield made


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


# ---- Operations


@pytest.mark.parametrize(
    ("dtype", "rate"), [(torch.float32, 1e12), (torch.float16, 4e12), (torch.bfloat16, 8e12)], ids=str
)
def test_product_takes_its_operations_at_the_highest_clock(dtype: torch.dtype, rate: float, job: World) -> None:
    a = ones(512, 512, dtype=dtype)
    bound = bound_time(lambda: a @ a)
    assert bound.compute == pytest.approx(2 * 512**3 / rate / 2)
    assert bound.seconds == bound.compute
    assert bound.operators[0].bounded_by == "compute"


def test_setting_for_float32_decides_the_rate(job: World) -> None:
    a = ones(512, 512)
    exact = bound_time(lambda: a @ a).compute
    torch.set_float32_matmul_precision("high")
    try:
        assert bound_time(lambda: a @ a).compute == pytest.approx(exact / 2)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_scaled_product_has_the_rate_of_its_factors(job: World) -> None:
    a, one = ones(512, 512, dtype=torch.float8_e4m3fn), torch.ones((), device="cuda")
    bound = bound_time(lambda: torch._scaled_mm(a, a.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16))
    assert bound.compute == pytest.approx(2 * 512**3 / 16e12 / 2)


def test_addend_does_not_decide_the_rate(job: World) -> None:
    a, bias = ones(512, 512, dtype=torch.bfloat16), ones(512, dtype=torch.bfloat16)
    assert bound_time(lambda: torch.addmm(bias, a, a)).compute == pytest.approx(2 * 512**3 / 8e12 / 2)


@pytest.mark.parametrize(
    ("options", "share"),
    [({}, 1.0), ({"is_causal": True}, 513 / 1024), ({"attn_mask": True}, 0.0)],
    ids=["whole", "causal", "mask"],
)
def test_attention_counts_what_no_kernel_skips(options: dict[str, bool], share: float) -> None:
    with world(1, gpu="H100"):
        q = ones(2, 4, 512, 64, dtype=torch.bfloat16).requires_grad_()
        if options.pop("attn_mask", False):
            options = {"attn_mask": ones(2, 1, 512, 512, dtype=torch.bool)}  # type: ignore[dict-item]

        def step() -> None:
            nn.functional.scaled_dot_product_attention(q, q, q, **options).sum().backward()  # type: ignore[arg-type]

        bound = bound_time(step)
        assert bound.flops > 0
        assert bound.compute == pytest.approx(share * bound.flops / (989.4e12 * 1980 / 1830))


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_convolution_counts_one_multiplication_for_each_output_and_pair_of_channels(
    is_transposed: bool, groups: int, job: World
) -> None:
    kind = nn.ConvTranspose2d if is_transposed else nn.Conv2d
    layer = kind(16, 16, 3, padding=1, groups=groups, bias=False).cuda()
    x = ones(4, 16, 32, 32).requires_grad_()

    def step() -> None:
        layer(x).sum().backward()

    one = 2 * 4 * 16 * 32 * 32 * 16 // groups
    assert bound_time(step).compute == pytest.approx(3 * one / 2e12 / 2)


def test_branch_that_may_not_run_is_not_certain(job: World) -> None:
    a = ones(512, 512).requires_grad_()

    def step() -> None:
        torch.cond(a.sum() > 0, lambda x: x @ x, lambda x: x.clone(), (a,)).sum().backward()

    bound = bound_time(step)
    assert (bound.flops > 0, bound.compute) == (True, 0)


def test_operations_are_those_of_the_shard(job: World) -> None:
    mesh = init_device_mesh("cuda", (16,))
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)).cuda()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    x = ones(8, 64)
    with counting_flops() as counted:
        model(x)
    assert counted.get_total_flops() == 2 * 2 * 8 * 64 * 256 // 16


# ---- Memory

SIZE = 4 * 2**20  # bytes of `large()`


def large() -> Tensor:
    return ones(1024, 1024)


@pytest.mark.parametrize(
    ("name", "call", "transferred"),
    [
        ("reads and writes", lambda x: x + 1, 2 * SIZE - 2 * CACHE),
        ("two inputs", lambda x: x + x.clone(), 2 * (2 * SIZE - 2 * CACHE) + SIZE),
        ("one input twice", lambda x: x * x, 2 * SIZE - 2 * CACHE),
        ("in place", lambda x: x.add_(1), 2 * SIZE - 2 * CACHE),
        ("copy", lambda x: x.copy_(x[:1].expand_as(x)), SIZE - CACHE),
        ("factory", lambda x: torch.zeros_like(x), SIZE - CACHE),
        ("selection", lambda x: x[torch.zeros(1024, dtype=torch.long, device="cuda")], SIZE - CACHE),
        ("reduction", lambda x: x.sum(), SIZE - CACHE),
        ("half of the columns", lambda x: x[:, ::2].sum(), SIZE // 2 - CACHE),
        ("overlapping windows", lambda x: x.flatten().unfold(0, 512, 1).sum(), 0),
        ("foreach", lambda x: torch._foreach_add_([x, x.view(-1)], 1.0), 2 * SIZE - 2 * CACHE),
        ("view", lambda x: x.t().view(-1, 1) if x.t().is_contiguous() else x.view(-1).detach(), 0),
        ("no values", lambda x: torch.empty_like(x), 0),
        ("fits into the cache", lambda x: x[:64] + 1, 0),
        ("unknown operator", lambda x: torch.sort(x), 0),
    ],
)
def test_traffic_is_what_the_cache_cannot_save(
    name: str, call: Callable[[Tensor], object], transferred: int, job: World
) -> None:
    x = large()
    assert bound_time(lambda: call(x)).memory == pytest.approx(transferred / 1e12)


def test_optimizer_reads_and_writes_parameters_and_states(job: World) -> None:
    weight = nn.Parameter(large())
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = large()
    optimizer.step()
    assert bound_time(optimizer.step).memory == pytest.approx((7 * SIZE - 2 * CACHE) / 1e12)


# ---- Streams and collectives


def test_streams_run_at_the_same_time_unless_one_waits(job: World) -> None:
    a, stream = ones(512, 512), torch.cuda.Stream()

    def step(waits: bool) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        a @ a
        with torch.cuda.stream(stream):
            if waits:
                stream.wait_stream(torch.cuda.default_stream())
            a @ a
        torch.cuda.current_stream().wait_stream(stream)

    one = 2 * 512**3 / 2e12
    assert bound_time(lambda: step(False)).seconds == pytest.approx(one)
    assert bound_time(lambda: step(True)).seconds == pytest.approx(2 * one)


def test_work_of_a_stream_that_never_waits_may_belong_to_the_step_before(job: World) -> None:
    a, stream = ones(512, 512), torch.cuda.Stream()

    def step() -> None:
        with torch.cuda.stream(stream):
            a @ a
        torch.cuda.current_stream().wait_stream(stream)
        a @ a
        a @ a

    assert bound_time(step).seconds == pytest.approx(2 * 2 * 512**3 / 2e12)


@pytest.mark.parametrize("way", ["no handle", "immediate wait", "later wait"])
def test_communication_counts_unless_it_overlaps(way: str, job: World) -> None:
    a, x = ones(1024, 1024), ones(1000)

    def step() -> None:
        work = dist.all_reduce(x, async_op=way != "no handle")
        if way == "immediate wait":
            work.wait()  # type: ignore[union-attr]
        a @ a
        if way == "later wait":
            work.wait()  # type: ignore[union-attr]

    bound = bound_time(step)
    assert bound.network == pytest.approx(4000 / 8 / 1e10)  # eight ranks of this machine share the traffic
    assert bound.not_overlapped == pytest.approx(0 if way == "later wait" else bound.network, abs=1e-12)
    assert bound.seconds == pytest.approx(bound.compute + bound.not_overlapped)


def gather(group: dist.ProcessGroup) -> None:
    dist.all_gather_into_tensor(ones(1000 * group.size()), ones(1000), group=group)


def scatter(group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_tensor(ones(1000), ones(1000 * group.size()), group=group)


def exchange(group: dist.ProcessGroup) -> None:
    dist.all_to_all_single(ones(1000 * group.size()), ones(1000 * group.size()), group=group)


def exchange_unevenly(group: dist.ProcessGroup) -> None:
    rank, size = dist.get_rank(group), group.size()
    splits = [1000 if other == rank else 10 for other in range(size)]
    dist.all_to_all_single(ones(sum(splits)), ones(sum(splits)), splits, splits, group=group)


@pytest.mark.parametrize(
    ("call", "near", "all_ranks"),
    [
        (gather, 4000 * 7 / 1e11, 4000 * 15 / 1.1e11),  # what the adapters receive takes 4000 * 8 / 8 / 1e10
        (scatter, 4000 * 7 / 1e11, 4000 * 15 / 1.1e11),
        (exchange, 4000 * 7 / 1e11, 4000 * 8 / 1e10),
        (exchange_unevenly, 40 * 7 / 1e11, 40 * 15 / 1.1e11),  # which part takes the network is unknown
        (lambda group: dist.all_reduce(ones(1000), group=group), 4000 / 1e11, 4000 / 8 / 1e10),
        (lambda group: dist.send(ones(1000), 1, group=group), 4000 / 1e11, 4000 / 1e11),
        (lambda group: dist.recv(ones(1000), 1, group=group), 4000 / 1e11, 4000 / 1e11),
        (lambda group: dist.barrier(group=group), 0, 0),
    ],
    ids=["gather", "scatter", "exchange", "uneven exchange", "reduce", "send", "recv", "barrier"],
)
def test_bytes_that_must_cross_take_time(
    call: Callable[[object], object], near: float, all_ranks: float, job: World
) -> None:
    """`near` is for the eight ranks of this machine, and `all_ranks` for the sixteen of the job."""
    machine = dist.new_group(range(8))
    assert bound_time(lambda: call(machine)).network == pytest.approx(near)
    assert bound_time(lambda: call(dist.group.WORLD)).network == pytest.approx(all_ranks)


def test_owner_of_the_largest_shard_receives_the_others(job: World) -> None:
    dist.all_gather_into_tensor(ones(16000), ones(1000))
    owner = replace(job.collectives[-1], bytes_sent=40_000, bytes_received=64_000)
    crossing = crossing_of(owner, job.rank, per_node=8)
    assert (crossing.received, crossing.sent, crossing.network_received, crossing.spans) == (24_000, 40_000, 0, True)


def test_more_work_never_lowers_the_least_time() -> None:
    main, side = (0, 0), (0, 1)

    def time(last: float) -> float:
        waits = Wait(side, {main: 1}), Wait(main, {side: 2})
        runs = Run(main, 1, 5.0), Run(side, 1, 4.0), Run(side, 2, last)
        return least_time([runs[0], waits[0], *runs[1:], waits[1]])

    assert [time(0.0), time(0.5), time(1.5), time(9.0)] == [9.0, 9.5, 10.5, 18.0]


def test_message_to_another_machine_takes_the_network(job: World) -> None:
    assert bound_time(lambda: dist.send(ones(1000), 9)).network == pytest.approx(4000 / 1e10)


# ---- Compilers and checkpoints


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return ((x * 2 + 1) * 3).relu()


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["script", "LSTM"])
def test_fused_kernels_may_do_less_than_their_operators(kind: str, job: World) -> None:
    layer = nn.Linear(256, 256, bias=False).cuda()
    fused = nn.LSTM(256, 256).cuda() if kind == "LSTM" else scripted
    x = ones(CACHE // 256, 256)

    def step() -> None:
        result = fused(x.requires_grad_())
        layer(result[0] if kind == "LSTM" else result).sum().backward()

    bound = bound_time(step)
    assert {one.operator for one in bound.operators} == {"mm"}
    assert bound.compute == pytest.approx(3 * 2 * CACHE * 256 / 1e12 / 2)
    assert bound.memory == 0


def checkpointed(layer: nn.Module, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        y: Tensor = checkpoint(layer, x, use_reentrant=False)
        y.sum().backward()

    return step


def test_compiled_program_has_only_work_that_no_compiler_removes(job: World) -> None:
    layer = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False)).cuda()
    x = ones(4096, 512)
    step, one = checkpointed(layer, x), 2 * 4096 * 512**2 / 2e12
    eager = bound_time(step)
    torch.compile(lambda: None)()
    compiled = bound_time(step)
    assert (eager.is_compiled, compiled.is_compiled) == (False, True)
    assert eager.compute == pytest.approx(6 * one)  # the first product is repeated; the input needs no gradient
    assert compiled.compute == pytest.approx(5 * one)
    assert (eager.memory > 0, compiled.memory) == (True, 0)


def test_repeated_operations_are_not_part_of_the_utilization() -> None:
    with world(1, gpu=replace(GPU, rates=replace(RATES, boost=1.0))):
        layer = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False)).cuda()
        bound = bound_time(checkpointed(layer, ones(4096, 512)))
    assert bound.utilization == pytest.approx(5 * 2 * 4096 * 512**2 / 1e12 / bound.seconds)


def test_operators_are_summed_over_layers_and_named(job: World) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]).cuda()
    x = ones(4096, 512)
    found = {(one.operator, one.module): one.calls for one in bound_time(lambda: model(x).sum().backward()).operators}
    assert found["mm", "forward of *"] == 3
    assert found["mm", "backward of *"] == 5


# ---- Errors and reports


def test_bound_needs_a_world_with_known_rates() -> None:
    with pytest.raises(RuntimeError, match="call bound_time\\(\\) in a block of world"):
        bound_time(lambda: None)
    with world(2, gpu=None), pytest.raises(ValueError, match="the job has no GPUs"):
        bound_time(lambda: None)
    with world(1, gpu=FakeGPU("a GPU", memory=2**30)), pytest.raises(ValueError, match="rates of 'a GPU' are unknown"):
        bound_time(lambda: None)


def test_error_in_a_step_stops_recording(job: World) -> None:
    def step() -> None:
        raise KeyError("step")

    with pytest.raises(KeyError):
        bound_time(step)
    a = ones(512, 512)
    assert len(bound_time(lambda: a @ a).operators) == 1
    assert job_of(job).recorder.listener is None


@pytest.mark.parametrize("text", ["memory", "memory=", "speed=3", "memory=-1", "memory=nan", "boost=2", "memory=inf"])
def test_wrong_rates_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected rates such as memory=3350"):
        PeakRates().with_text(text)


def test_rates_have_to_be_positive() -> None:
    with pytest.raises(ValueError, match="`memory`: expected a positive number, got 0"):
        PeakRates(memory=0)
    with pytest.raises(ValueError, match="`bfloat16`: expected a number of at least 0, got -1"):
        PeakRates(bfloat16=-1)


def test_rates_are_given_in_the_units_of_data_sheets() -> None:
    rates = PeakRates(float32=1.0).with_text("bfloat16=989, network=50")
    assert (rates.float32, rates.bfloat16, rates.network) == (1.0, 989e12, 50e9)


def test_bound_is_plain_data_and_a_sentence(job: World) -> None:
    a = ones(512, 512)
    bound = bound_time(lambda: a @ a)
    assert json.loads(json.dumps(bound.to_dict()))["seconds"] == bound.seconds
    assert str(bound).startswith("A step takes at least 0.000134 s (compute 0.000134, memory 0, network 0).")
    assert "MFU is at most 50 %" in str(replace(bound, utilization=0.5))


# ---- Published measurements

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "time_bounds.py"


@cache
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_time_bounds", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


SHORT = (*range(10), 11, 12)  # GPT-2 124M and ResNet-50


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.*_autograd.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "number", [number if number in SHORT else pytest.param(number, marks=pytest.mark.long) for number in range(44)]
)
def test_bound_is_below_the_published_time(number: int) -> None:
    entry = benchmark().ENTRIES[number]
    bound: TimeBound = benchmark().bound_of(entry)
    assert 0.1 < bound.seconds / entry.seconds < 1


def test_all_published_measurements_are_tested_and_in_the_table() -> None:
    entries = benchmark().ENTRIES
    assert len(entries) == 44
    rows = [line for line in benchmark().PAGE.read_text().splitlines() if line.startswith("| [")]
    assert [row.split("]")[0] for row in rows] == [f"| [{entry.model}" for entry in entries]
    assert all(float(row.split("|")[-2]) < 1 for row in rows)
