"""Shards have the bits of the whole tensor at the cost of the shard: csrc/extensions/parts/demands.cpp."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable

import forked
import pytest
import torch
from common import assert_same_tensor, build_both
from pairs import parametrize_pairs
from random_shards import random_program
from torch import Tensor, nn

from torchext import _C
from torchext.deferred_init import (
    defer_again,
    deferred_init,
    explain,
    materialize_module,
    materialize_tensor,
    summary,
)
from torchext.internals.patching import TORCH_RELEASE

ROWS, COLUMNS = 96, 80

INITIALIZERS: dict[str, Callable[[Tensor], object]] = {
    "normal_": lambda t: t.normal_(0.5, 2),
    "uniform_": lambda t: t.uniform_(-1, 2),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "trunc_normal_ that rejects": lambda t: nn.init.trunc_normal_(t, 0, 1.5),
    "trunc_normal_ of far bounds": lambda t: nn.init.trunc_normal_(t, 0, 0.02),
    "trunc_normal_ of the tail": lambda t: nn.init.trunc_normal_(t, 0, 1, 1.5, 3),
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda t: nn.init.sparse_(t, 0.25),
    "eye_": nn.init.eye_,
    "constant_": lambda t: nn.init.constant_(t, 3),
    "bernoulli_": lambda t: t.bernoulli_(0.25),
    "exponential_": lambda t: t.exponential_(),
    "written twice": lambda t: t.normal_().uniform_(),
    "scaled": lambda t: t.normal_().mul_(0.02).add_(1),
    "clamped": lambda t: t.normal_().clamp_(-1, 1),
    "clamped at zero": lambda t: t.normal_().clamp_(min=0),
    "exponentials": lambda t: t.normal_().exp_(),
    "divided by its norm": lambda t: t.normal_().div_(t.norm()),
    "a row of zeros": lambda t: t.normal_()[3].zero_(),
    "columns of zeros": lambda t: t.normal_()[:, 20:50].zero_(),
    "block by block": lambda t: [part.normal_() for row in t.split(25) for part in row.split(33, 1)],
    "row by row": lambda t: [t[i].uniform_() for i in range(ROWS)],
    "its rows shifted": lambda t: t.normal_()[1:].copy_(t[:-1].clone()),
    "transposed": lambda t: t.t().copy_(torch.randn(COLUMNS, ROWS)),
    "flat": lambda t: t.view(-1).normal_(),
    "the halves exchanged": lambda t: t.copy_(torch.cat([t.normal_()[48:], t[:48]])),
}

SHARDS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda t: t[24:48].clone(),
    "uneven rows": lambda t: t.chunk(7)[-1].clone(),
    "one row": lambda t: t[95].clone(),
    "every third row": lambda t: t[1::3].clone(),
    "columns": lambda t: t[:, 10:20].contiguous(),
    "every column in 60": lambda t: t[:, 1::60].contiguous(),
    "every second column of every fifth row": lambda t: t[3::5, ::2].contiguous(),
    "one column": lambda t: t[:, 79].clone(),
    "columns of the transpose": lambda t: t.t()[30:40].contiguous(),
    "a block": lambda t: t[10:20, 30:47].contiguous(),
    "some heads": lambda t: t.view(12, 8, COLUMNS)[3:5].clone(),
    "halves of heads": lambda t: t.view(12, 8, COLUMNS)[:, :4].reshape(-1, COLUMNS),
    "a stretch across rows": lambda t: t.view(-1)[1000:2345].clone(),
    "padded rows": lambda t: t.new_zeros(20, COLUMNS).narrow(0, 0, 16).copy_(t[80:]),
    "rows with padding": lambda t: nn.functional.pad(t, (0, 0, 0, 32))[90:120].clone(),
    "the same part of three": lambda t: torch.cat([part[:4] for part in t.chunk(3)]),
    "a part of several together": lambda t: torch.stack([t, t + 1])[:, 5:9].clone(),
    "rows in half precision": lambda t: t.to(torch.bfloat16)[8:24].clone(),
    "scaled rows": lambda t: (t * 0.5)[8:24].clone(),
    "rows of a sum": lambda t: (t + torch.rand(ROWS, COLUMNS))[8:24].clone(),
    "rows of a product": lambda t: (t @ torch.rand(COLUMNS, 64, dtype=t.dtype))[8:24].clone(),
    "the sum of some rows": lambda t: t[8:24].sum(0),
    "nothing": lambda t: t[5:5].clone(),
}


def build(initialize: Callable[[Tensor], object], shard: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
    weight = torch.empty(ROWS, COLUMNS, dtype=dtype)
    initialize(weight)
    torch.rand(3)
    return shard(weight)


@pytest.mark.cases(49)
@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("initialize", INITIALIZERS.values(), ids=INITIALIZERS)
def test_a_shard_has_the_bits_of_the_whole(
    initialize: Callable[[Tensor], object], shard: Callable[[Tensor], Tensor]
) -> None:
    eager, deferred = build_both(lambda: build(initialize, shard, torch.float32))
    assert_same_tensor(materialize_tensor(deferred), eager)


@parametrize_pairs(
    name=["normal_", "uniform_", "trunc_normal_ that rejects", "scaled", "block by block"],
    part=[*SHARDS],
    dtype=[torch.float64, torch.bfloat16, torch.float16],
)
def test_a_shard_has_the_bits_of_the_whole_in_any_precision(name: str, part: str, dtype: torch.dtype) -> None:
    eager, deferred = build_both(lambda: build(INITIALIZERS[name], SHARDS[part], dtype))
    assert_same_tensor(materialize_tensor(deferred), eager)


# More values than one thread fills, in sizes that are not multiples of 16.
@pytest.mark.cases(2)
@pytest.mark.parametrize("shape", [(1001, 607), (607, 1001), (607_617,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["normal_", "uniform_", "trunc_normal_ that rejects"])
def test_shards_of_large_tensors_have_the_bits_of_the_whole(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def build() -> list[Tensor]:
        weight = torch.empty(shape, dtype=dtype)
        INITIALIZERS[name](weight)
        last = weight.size(-1)
        return [
            weight[-3:].clone(),
            weight[: weight.size(0) // 2].clone(),
            weight[..., last // 3 : last // 2].contiguous(),
            weight[..., -5:].contiguous(),
        ]

    eager, deferred = build_both(build)
    for shard, expected in zip(reversed(deferred), reversed(eager), strict=True):
        assert_same_tensor(materialize_tensor(shard), expected)


def test_nans_have_the_bits_of_the_whole() -> None:
    def build() -> Tensor:
        weight = torch.empty(64, 100)
        weight.copy_(torch.arange(0x7F800000, 0x7F800000 + 6400, dtype=torch.int32).view(torch.float32).view(64, 100))
        return weight.to(torch.bfloat16)[3:17, 5:60].contiguous()

    eager, deferred = build_both(build)
    found = materialize_tensor(deferred)
    assert torch.equal(found.view(torch.int16), eager.view(torch.int16))


def cloned_into(t: Tensor) -> list[Tensor]:
    out = torch.zeros(2000)
    torch.ops.aten.clone.out(t.view(-1)[:1000], memory_format=None, out=out[:1000])
    return [out[500:700].clone(), out[900:1100].clone()]


def resized(t: Tensor) -> list[Tensor]:
    t.resize_(2 * ROWS, COLUMNS)
    return [t[ROWS - 3 : ROWS].clone()]


# Error-prone cases: one for each bug that was found.
CASES: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "halves of doubles": lambda t: [t.double().normal_().view(torch.int32).view(ROWS, COLUMNS, 2)[:, :, 1].clone()],
    "bytes of halves": lambda t: [t.bfloat16().normal_().view(torch.uint8)[:, 1::2].clone()],
    "clone with an out": cloned_into,
    "grown rows": resized,
    "one row times an integer": lambda t: [(t.bfloat16() * (torch.arange(ROWS)[:, None] * 41))[57:58].clone()],
    "one column over an integer": lambda t: [(t.half() / (torch.arange(COLUMNS) + 3))[:, 7:8].clone()],
    "not a number times not a number": lambda t: [t.mul_(float("inf")).mul_(0).mul_(float("nan"))[3:5].clone()],
    "integers that do not hold the numbers": lambda t: [t.mul(1e12).to(torch.int16)[3:5, 7:20].clone()],
    "rows shifted in place": lambda t: [t, t[:, 1:].copy_(t[:, :-1])[3:5].clone()][1:],
    "nothing of a row": lambda t: [t.mul_(2)[3, :0].clone(), t[5:7].clone()],
    "parts that are read with their alignment": lambda t: [
        t.view(16, 6, COLUMNS)[1, 2:4].exp(),
        t.view(16, 6, COLUMNS)[0, 2:4].clone(),
    ],
    "an expanded row and its sum": lambda t: [t[3:4].expand(5, COLUMNS).exp(), t[4:5].clone(), t[5, 3:].sum()],
    "windows": lambda t: [t.view(-1)[100:400].unfold(0, 7, 3).exp()],
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts_have_the_bits_of_the_whole_where(case: Callable[[Tensor], list[Tensor]]) -> None:
    def build() -> list[Tensor]:
        return case(torch.empty(ROWS, COLUMNS).normal_())

    eager, deferred = build_both(build)
    for shard, expected in zip(deferred, eager, strict=True):
        materialize_tensor(shard)
        if expected.is_floating_point():  # NaNs count as equal
            shard, expected = (t.view({2: torch.int16, 4: torch.int32}[t.element_size()]) for t in (shard, expected))
        assert torch.equal(shard, expected)


def test_uninitialized_memory_is_filled_in_deterministic_mode() -> None:
    def build() -> Tensor:
        t = torch.empty(100, 64)
        t[3:5] = 1
        return t[4:7].clone()

    torch.use_deterministic_algorithms(True)
    try:
        eager, deferred = build_both(build)
        assert_same_tensor(materialize_tensor(deferred), eager)
    finally:
        torch.use_deterministic_algorithms(False)


def test_unsliceable_operators_do_not_force_whole_computations_of_others() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.empty(64, 32).normal_()
            self.first = nn.Parameter(weight[3:5].clone())
            nans = torch.empty(64, 32).normal_().mul_(float("inf")).mul_(0)
            self.nans = nn.Parameter(nans.to(torch.bfloat16)[3:17, 5:9].contiguous())
            self.more = nn.Parameter(nans[7:9].to(torch.bfloat16))
            self.last = nn.Parameter(torch.empty(64, 32).uniform_()[:, 3:5].contiguous())

    eager, deferred = build_both(Model)
    progress: list[int] = []
    _C.materialize(list(deferred.parameters()), on_done=progress.append)
    assert sorted(progress) == sorted(parameter.nbytes for parameter in eager.parameters())
    for found, expected in zip(deferred.parameters(), eager.parameters(), strict=True):
        whole = {2: torch.int16, 4: torch.int32}[found.element_size()]
        assert torch.equal(found.view(whole), expected.view(whole))


def test_copy_of_a_tensor_kept_by_a_kernel_does_not_write_its_memory() -> None:
    cache = torch.ones(1000)
    library = torch.library.Library("torchext_test_shards", "FRAGMENT")
    library.define("cached() -> Tensor")
    library.impl("cached", lambda: cache, "CompositeExplicitAutograd")
    library.impl("cached", lambda: torch.empty(1000), "Meta")
    for _ in range(2):
        doubled = deferred_init(lambda: torch.ops.torchext_test_shards.cached().clone().mul_(2))
        assert torch.equal(materialize_tensor(doubled), torch.full((1000,), 2.0))
    assert torch.equal(cache, torch.ones(1000))
    library._destroy()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_regions_narrower_than_an_element_are_computed(width: int, dtype: torch.dtype) -> None:
    def build() -> list[Tensor]:
        weight = torch.empty(1024).normal_()
        viewed = weight.view(dtype)
        return [viewed[20 : 20 + width].clone(), viewed[-width:].clone(), viewed[1::37].clone()]

    eager, deferred = build_both(build)
    for shard, expected in zip(reversed(deferred), reversed(eager), strict=True):
        assert_same_tensor(materialize_tensor(shard), expected)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize(
    "seeds", [range(500), pytest.param(range(500, 20_000), marks=pytest.mark.long)], ids=["few", "many"]
)
def test_random_programs_have_the_shards_of_eager_construction(seeds: range) -> None:
    for seed in seeds:
        eager, deferred = build_both(random_program(seed), seed)
        order = list(range(len(deferred)))
        random.Random(seed).shuffle(order)
        for i in order:
            materialize_tensor(deferred[i])
        for found, expected in zip(deferred, eager, strict=True):
            assert_same_tensor(found, expected, f"seed {seed}")


def test_explanation_names_the_elements_that_are_computed() -> None:
    def build() -> Tensor:
        weight = torch.empty(64, 32).normal_()
        weight[5].zero_()
        return (weight * 2)[8:16].add(weight[40:64:3])

    operations = {operation.name: operation for operation in explain(deferred_init(build))}
    assert operations["aten::normal_"].parts == "[8:16], [40:62:3]"
    assert operations["aten::mul"].parts == "[8:16]"
    assert operations["aten::add"].parts is None
    assert not operations["aten::zero_"].runs
    assert "only [8:16], [40:62:3]" in str(operations["aten::normal_"])


def test_time_is_predicted_for_the_elements_that_are_computed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shard = nn.Parameter(torch.empty(4096, 256).normal_()[64:128].clone())

    lines = str(summary(deferred_init(Model), time="predicted")).splitlines()
    fill = next(line for line in lines if "normal_" in line)
    assert "64.00 KiB" in fill


def test_shards_can_be_deferred_again_and_placed() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = torch.empty(64, 32).normal_()
            self.rows = nn.Parameter(weight[8:16].clone())
            self.columns = nn.Parameter(weight[:, 8:16].contiguous())

    eager, deferred = build_both(Model)
    materialize_tensor(deferred.columns)
    materialize_module(deferred, retain_graph=True)
    defer_again(deferred.rows)
    materialize_module(deferred, dtype=torch.bfloat16)
    assert torch.equal(deferred.rows, eager.rows.bfloat16())
    assert torch.equal(deferred.columns, eager.columns)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of PyTorch has no torch.distributed")
@pytest.mark.parametrize("rank", range(8))
def test_shards_on_a_mesh_of_three_dimensions_are_those_of_the_whole(rank: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (2, 2, 2))
        for placements in ([Shard(0), Shard(1), Shard(0)], [Shard(1), Replicate(), Shard(1)], [Shard(0)] * 3):
            eager, deferred = build_both(lambda: torch.empty(64, 33).normal_().mul_(2))
            shard = distribute_tensor(deferred, mesh, placements).to_local()
            expected = distribute_tensor(eager, mesh, placements, src_data_rank=None).to_local()
            assert torch.equal(materialize_tensor(shard), expected)
    finally:
        dist.destroy_process_group()


MEMORY = """
import torch
from torchext.deferred_init import deferred_init, materialize_tensor

def megabytes(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(name))

def build():
    weight = torch.empty(8192, 4096)  # 128 MiB
    torch.nn.init.{initializer}(weight)
    return {shard}

materialize_tensor(deferred_init(torch.rand, 100000))  # what is found out once
shard = deferred_init(build)
before = megabytes("VmRSS")
materialize_tensor(shard)
print(megabytes("VmHWM") - before, shard.untyped_storage().nbytes() / 2**20)
"""


@pytest.mark.cases(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.parametrize(
    "initializer",
    [
        "normal_",
        "kaiming_uniform_",
        pytest.param(
            "trunc_normal_",
            marks=pytest.mark.skipif(
                TORCH_RELEASE < (2, 12), reason="made of `erfinv_`, which has no parts, before 2.12"
            ),
        ),
    ],
)
@pytest.mark.parametrize(
    "shard",
    [
        "weight[128:256].clone()",
        "weight[:, 64:128].contiguous()",
        "weight.t()[64:128].contiguous()",
        "weight[5::333].clone()",
        "weight[:, 1::51].contiguous()",
        "weight[:, 1::513].contiguous()",
        "weight.mul_(0.9).sub_(torch.randn(8192, 4096) * 0.1)[:, 1::513].contiguous()",
    ],
    ids=[
        "rows",
        "columns",
        "columns of the transpose",
        "some rows",
        "many columns",
        "some columns",
        "some columns after a step",
    ],
)
def test_memory_holds_the_shard_and_little_more(initializer: str, shard: str) -> None:
    program = MEMORY.format(initializer=initializer, shard=shard)
    result = forked.run([sys.executable, "-c", program], check=True)
    grown, size = map(float, result.stdout.split())
    assert grown < 3 * size + 32
