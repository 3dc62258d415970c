"""Initial weights on a mesh, compared with those of one process by `check_init()` and `torchext check-init`."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchext
from torchext import commands
from torchext.check_init.ranks import Job, run_rank
from torchext.deferred_init import check_init
from torchext.fake import fake_mode

PLAN = {"blocks.0.0": ColwiseParallel(), "blocks.0.1": RowwiseParallel()}


class Model(nn.Module):
    """Uneven shapes, tied parameters, buffers, and parameters smaller than the mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)) for _ in range(2))
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.rand(5), persistent=False)


def build() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def rank() -> int:
    return int(os.environ["RANK"])


def names_of(found: Any, is_different: bool = True) -> list[str]:
    return [check.name for mesh in found for check in mesh.checks if check.is_different == is_different]


# ---- Right programs ----


@pytest.mark.cases(2)
@pytest.mark.parametrize("deferred", [False, True], ids=["real", "deferred"])
@pytest.mark.parametrize(
    ("engine", "meshes"),
    [
        ("fsdp2", ["fsdp=3", "fsdp=4", "replicate=2,fsdp=3"]),
        ("hsdp", ["replicate=2,fsdp=2"]),
        ("tp", ["tp=2", "model=3"]),
        ("fsdp2", ["fsdp=2,tp=2"]),
        ("ddp", ["data=2"]),
    ],
)
def test_right_program_is_the_same_on_every_mesh(engine: str, meshes: list[str], deferred: bool) -> None:
    found = check_init(build, meshes, engine=engine, tp_plan=PLAN, deferred=deferred)
    assert found.is_same, found
    assert [len(mesh.ranks) for mesh in found] == [torch.Size(one.mesh.values()).numel() for one in found]
    assert {mesh.tensors for mesh in found} == {16}


def test_program_may_shard_itself() -> None:
    def on_mesh(mesh: DeviceMesh) -> nn.Module:
        model = build()
        parallelize_module(model, mesh["tp"], PLAN)
        model.register_parameter(
            "by_columns", nn.Parameter(distribute_tensor(torch.rand(3, 7), mesh["dp"], [Shard(1)]))
        )
        model.register_buffer("twice", distribute_tensor(torch.rand(9), mesh, [Shard(0), Shard(0)]))
        return model

    assert check_init(on_mesh, "dp=2,tp=2", engine="none").is_same


@pytest.mark.ci
def test_program_on_meta_that_draws_whole_tensors_is_the_same() -> None:
    def on_meta() -> nn.Module:
        torch.manual_seed(0)
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))

    def initialize(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert isinstance(parameter, DTensor)
            whole = distribute_tensor(torch.rand(parameter.shape), parameter.device_mesh, [Replicate()])
            parameter.copy_(whole.redistribute(placements=parameter.placements))

    assert check_init(on_meta, ["fsdp=2", "fsdp=4"], initialize=initialize).is_same


def test_stages_of_a_pipeline_may_lack_tensors() -> None:
    def stage(mesh: DeviceMesh) -> nn.Module:
        model = build()
        if mesh.size() > 1:
            del model.blocks[1 - rank()]
            model.blocks = nn.ModuleDict({str(rank()): model.blocks[0]})
        return model

    assert check_init(stage, "stage=2", engine="none").is_same
    found = check_init(stage, "stage=2", engine="none", ranks=[0])
    assert names_of(found) == []
    assert names_of(found, is_different=False)[0] == "blocks.1.0.weight"
    assert found[0].checks[0].reason == "is held by no checked rank"
    assert names_of(check_init(stage, "fsdp=2", engine="fsdp2"))[0] == "blocks.0.0.weight"


def test_tensor_that_no_rank_holds_is_missing() -> None:
    def forgetting(mesh: DeviceMesh) -> nn.Module:
        model = build()
        if mesh.size() > 1:
            del model.norm
        return model

    assert names_of(check_init(forgetting, "stage=2", engine="none"))[0] == "norm.weight"


def test_chunks_without_placements_are_found() -> None:
    def sliced_by_hand(mesh: DeviceMesh) -> nn.Module:
        model = build()
        weight = model.embedding.weight.detach()
        model.embedding.weight = nn.Parameter(weight.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone())
        return model

    assert check_init(sliced_by_hand, "tp=3", engine="none").is_same


@pytest.mark.cases(1)
@pytest.mark.parametrize("deferred", [False, True], ids=["real", "deferred"])
def test_values_that_rank_0_sends_are_those_of_rank_0(deferred: bool) -> None:
    def seeded_by_rank() -> nn.Module:
        torch.manual_seed(rank())
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(3))

    plan = {"0": ColwiseParallel()}
    assert check_init(seeded_by_rank, "tp=4", engine="tp", tp_plan=plan, deferred=deferred).is_same
    assert check_init(seeded_by_rank, "data=3", engine="ddp", deferred=deferred).is_same


def test_seed_that_rank_0_sends_is_the_same() -> None:
    def agreeing() -> nn.Module:
        seed = [random.getrandbits(32) if rank() else 7]
        dist.broadcast_object_list(seed)
        torch.manual_seed(seed[0])
        return Model()

    assert check_init(agreeing, "fsdp=3").is_same


def test_collectives_take_their_options_by_name() -> None:
    def waiting() -> nn.Module:
        dist.barrier()
        return build()

    assert check_init(waiting, "fsdp=2").is_same


@pytest.mark.cases(2)
@pytest.mark.parametrize("backend", ["gloo", "nccl", "cpu:gloo,cuda:nccl"])
def test_groups_of_other_backends_do_not_connect(backend: str) -> None:
    def with_group() -> nn.Module:
        group = dist.new_group(backend=backend)
        dist.barrier(group)
        dist.monitored_barrier()
        return build()

    assert check_init(with_group, "fsdp=2").is_same


# ---- The same as in a job ----


def job_to_compare(mesh: DeviceMesh) -> nn.Module:
    """Return a module whose tensors come from other ranks in different ways."""
    torch.manual_seed(mesh.get_rank())
    model = parallelize_module(nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6)), mesh, {"0": ColwiseParallel()})
    model.register_buffer("sent", torch.rand(3))
    dist.broadcast(model.sent, 0)
    model.register_buffer("part", torch.empty(2))
    dist.scatter(model.part, list(torch.rand(2, 2)) if mesh.get_rank() == 0 else None, 0)
    model.register_buffer("drawn", distribute_tensor(torch.empty(5), mesh, [Shard(0)]))
    model.drawn.uniform_()
    model.append(nn.parallel.DistributedDataParallel(nn.Linear(3, 3)))
    return model


def local_tensors(mesh: DeviceMesh) -> list[torch.Tensor]:
    model = job_to_compare(mesh)
    tensors = chain(model.parameters(), model.buffers())
    return [one.detach().to_local() if isinstance(one, DTensor) else one.detach() for one in tensors]


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_lone_ranks_have_the_tensors_of_a_job_on_gloo(tmp_path: Path) -> None:
    def of_lone_rank(job: Job) -> None:
        torch.save(local_tensors(init_device_mesh("cpu", (2,))), tmp_path / f"lone {job.rank}")

    def of_rank(number: int) -> None:
        torch.set_num_threads(1)  # the OpenMP threads of the parent do not exist after fork
        dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=number, world_size=2)
        torch.save(local_tensors(init_device_mesh("cpu", (2,))), tmp_path / f"job {number}")
        os._exit(0)

    for number in range(2):
        run_rank(Job({"tp": 2}, number, tmp_path), of_lone_rank)
    processes = [multiprocessing.get_context("fork").Process(target=of_rank, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for number in range(2):
        lone, real = (torch.load(tmp_path / f"{kind} {number}") for kind in ("lone", "job"))
        assert len(lone) == len(real) == 9
        assert all(torch.equal(one, other) for one, other in zip(lone, real, strict=True))


# ---- Mistakes ----


def rank_dependent_seed() -> nn.Module:
    torch.manual_seed(rank())
    return Model()


def seed_of_the_replica() -> nn.Module:
    torch.manual_seed(rank() // 2)
    return Model()


def padding_that_draws() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
    size = int(os.environ["WORLD_SIZE"])
    padded = torch.rand(-(-5 // size) * size, 3)
    model[0].weight = nn.Parameter(padded[:5].T.contiguous())
    nn.init.normal_(model[1].weight)
    return model


def buffer_of_the_rank() -> nn.Module:
    model = build()
    model.table.add_(rank())
    return model


def order_of_the_rank() -> nn.Module:
    torch.manual_seed(0)
    parts = {name: nn.Linear(4, 4) for name in (("a", "b") if rank() % 2 == 0 else ("b", "a"))}
    return nn.Sequential(parts["a"], parts["b"])


def only_on_rank_0() -> nn.Module:
    model = build()
    model.extra = nn.Parameter(torch.full((8,), -1.0))
    if rank() == 0:
        nn.init.normal_(model.extra)
    return model


def seed_of_the_process() -> nn.Module:
    torch.manual_seed(random.getrandbits(32))
    return nn.Linear(4, 4)


@pytest.mark.cases(4)
@pytest.mark.parametrize("deferred", [False, True], ids=["real", "deferred"])
@pytest.mark.parametrize(
    ("program", "mesh", "first", "ranks", "source"),
    [
        (rank_dependent_seed, "fsdp=3", "embedding.weight", (1, 2), "aten::normal_ of [11, 6] at "),
        (seed_of_the_replica, "replicate=2,fsdp=2", "embedding.weight", (2, 3), "aten::normal_ of [11, 6] at "),
        (padding_that_draws, "fsdp=2", "1.weight", (0, 1), "aten::normal_ of [5, 3] at "),
        (buffer_of_the_rank, "fsdp=2", "table", (1,), ""),
        (order_of_the_rank, "fsdp=4", "0.weight", (1, 3), "aten::uniform_ of [4, 4] at "),
        (only_on_rank_0, "fsdp=4", "extra", (1, 2, 3), ""),
        (seed_of_the_process, "fsdp=2", "weight", (0, 1), "aten::uniform_ of [4, 4] at "),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_mistake_is_found(
    program: Callable[[], nn.Module], mesh: str, first: str, ranks: tuple[int, ...], source: str, deferred: bool
) -> None:
    found = check_init(program, mesh, deferred=deferred)
    check = found[0].checks[0]
    assert (check.name, check.is_different, check.ranks) == (first, True, ranks)
    assert check.first_element is not None
    assert check.value != check.value_in_one_process
    assert check.source.startswith(source)
    if source:
        assert f"{Path(__file__).name}:" in check.source


def test_first_element_counts_in_the_whole_tensor() -> None:
    def wrong() -> nn.Module:
        model = nn.Linear(2, 6, bias=False)
        nn.init.zeros_(model.weight)
        with torch.no_grad():
            model.weight[4, 1] = rank()
        return model

    check = check_init(wrong, "fsdp=2")[0].checks[0]
    assert (check.first_element, check.elements) == ((4, 1), 1)
    assert (check.value, check.value_in_one_process) == (1, 0)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_random_numbers_of_distributed_tensors_depend_on_the_mesh() -> None:
    """See https://github.com/pytorch/pytorch/issues/168058."""

    def on_meta() -> nn.Module:
        torch.manual_seed(0)
        with torch.device("meta"):
            return nn.Linear(4, 4)

    assert check_init(on_meta, "fsdp=1").is_same
    found = check_init(on_meta, "fsdp=2")
    assert names_of(found) == ["weight", "bias"]
    assert found[0].checks[0].source == "aten::uniform_ of [2, 4]"


def test_tensors_without_values_and_other_shapes_are_found() -> None:
    def wrong() -> nn.Module:
        model = nn.Module()
        model.register_buffer("uninitialized", torch.ones(2, device="meta" if rank() else "cpu"))
        model.register_buffer("converted", torch.ones(2, dtype=torch.float64 if rank() else torch.float32))
        if rank():
            model.register_buffer("new", torch.ones(2))
        return model

    found = check_init(wrong, "dp=2", engine="none", initialize=lambda model: None)
    reasons = {check.name: check.reason for check in found[0].checks}
    assert reasons["converted"] == "has the dtype torch.float64, but torch.float32 in one process"
    assert reasons["new"] == "does not exist in one process"


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for name in ("bool", "uint8", "int8", "float16", "float32", "complex64", "float8_e4m3fn"):
            self.register_buffer(name, torch.ones(3, dtype=getattr(torch, name)))

    def reset_parameters(self) -> None:
        self.float32 = torch.ones(3)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_tensors_that_nothing_initialized_differ() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return Forgetful()

    def initialize(model: nn.Module) -> None:
        nn.init.ones_(model.linear.weight)  # type: ignore[union-attr,arg-type]
        model.float32.zero_()  # type: ignore[union-attr,operator]

    expected = ["bool", "uint8", "int8", "float16", "complex64", "float8_e4m3fn"]
    for mesh in ("fsdp=1", "fsdp=2"):
        found = check_init(on_meta, mesh, initialize=initialize)
        assert sorted(names_of(found)) == sorted(["linear.bias", *expected])
        assert sorted(set(names_of(check_init(on_meta, mesh))) & set(expected)) == sorted(expected)


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_module_with_buffers_only_needs_an_initializer() -> None:
    def on_meta() -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 2), nn.Module())
            model[1].register_buffer("frequencies", torch.ones(3))
            return model

    with pytest.raises(torchext.RankFailedError, match="`1` .Module. is on the meta device and has no reset_param"):
        check_init(on_meta, "fsdp=2")


# ---- Tensors that depend on other ranks ----


def test_tensor_that_depends_on_other_ranks_is_not_comparable() -> None:
    def averaging() -> nn.Module:
        model = build()
        dist.all_reduce(model.table)
        gathered = [torch.empty(2) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, torch.ones(2))  # not used
        return model

    found = check_init(averaging, "fsdp=2")
    assert names_of(found) == []
    assert names_of(found, is_different=False) == ["table"]
    assert "depends on values of other ranks: allreduce at " in str(found)
    assert Path(__file__).name in str(found)
    assert not found.is_same
    assert not found.is_different


@pytest.mark.cases(1)
@pytest.mark.parametrize("value", [3.0, 3e7, float("inf"), float("-inf"), float("nan")])
def test_seed_of_other_ranks_is_not_comparable(value: float) -> None:
    def seeded_by_sum() -> nn.Module:
        seed = torch.full((2,), value, dtype=torch.bfloat16)
        dist.all_reduce(seed)
        torch.manual_seed(int(seed.nan_to_num(5, 6, 7)[1]))
        return nn.Linear(6, 5)

    assert set(names_of(check_init(seeded_by_sum, "fsdp=2"), is_different=False)) == {"weight", "bias"}


def test_tensor_from_a_rank_that_was_not_run_is_not_comparable() -> None:
    def sent() -> nn.Module:
        model = build()
        dist.broadcast(model.table, 0)
        return model

    assert check_init(sent, "fsdp=2").is_same
    assert names_of(check_init(sent, "fsdp=2", ranks=[1]), is_different=False) == ["table"]


def test_unknown_values_stay_unknown_when_they_are_sent() -> None:
    def sent() -> nn.Module:
        model = build()
        if rank() == 0:
            dist.all_reduce(model.table)
        dist.broadcast(model.table, 0)
        return model

    assert names_of(check_init(sent, "fsdp=2"), is_different=False) == ["table"]


def test_slice_by_hand_that_is_no_chunk_is_not_comparable() -> None:
    def sliced() -> nn.Module:
        model = nn.Linear(4, 4, bias=False)
        if int(os.environ["WORLD_SIZE"]) > 1:
            model.weight = nn.Parameter(torch.full((2, 4), -1.0))
        return model

    found = check_init(sliced, "tp=2", engine="none")
    assert names_of(found, is_different=False) == ["weight"]
    assert "is not a DTensor, and has the shape [2, 4], but [4, 4] in one process" in str(found)


def with_rows_by_hand(mesh: DeviceMesh, rows: list[int]) -> nn.Module:
    model = nn.Module()
    whole = torch.arange(8.0).view(4, 2)
    model.register_buffer("table", whole if mesh.size() == 1 else whole.chunk(2)[rows[mesh.get_rank()]].clone())
    return model


@pytest.mark.ci
@pytest.mark.parametrize("rows", [[0, 0, 1, 1], [0, 1, 0, 1]])
def test_chunks_by_hand_may_follow_any_dimension_of_the_mesh(rows: list[int]) -> None:
    assert check_init(partial(with_rows_by_hand, rows=rows), "fsdp=2,tp=2", engine="none").is_same


@pytest.mark.cases(1)
@pytest.mark.parametrize("rows", [[0, 0, 0, 1], [0, 1, 1, 1]])
def test_chunks_by_hand_must_follow_one_dimension_of_the_mesh(rows: list[int]) -> None:
    found = check_init(partial(with_rows_by_hand, rows=rows), "fsdp=2,tp=2", engine="none")
    assert names_of(found, is_different=False) == ["table"]
    assert "chunks along no single dimension of the mesh (ranks 0-3)" in str(found)


# ---- Arguments and errors ----


@pytest.mark.ci
def test_ranks_of_a_large_mesh_are_at_its_ends() -> None:
    found = check_init(build, "replicate=4,fsdp=32")
    assert found.is_same
    assert found[0].ranks == (0, 1, 31, 32, 33, 63, 96, 97, 127)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"meshes": "fsdp"}, "expected sizes by name such as fsdp=8,tp=2, got 'fsdp'"),
        ({"meshes": "a=2,a=3"}, "expected sizes by name"),
        ({"meshes": {"fsdp": 0}}, "expected sizes by name"),
        ({"meshes": "fsdp=2", "engine": "zero"}, "engine: expected one of fsdp2, hsdp, tp, ddp, none, got 'zero'"),
        ({"meshes": "fsdp=2", "engine": "hsdp"}, "hsdp needs one dimension to replicate and one to shard besides `tp`"),
        ({"meshes": "tp=2"}, "the engine fsdp2 needs one dimension"),
        ({"meshes": []}, "meshes: expected at least one mesh such as fsdp=8, got none"),
        ({"meshes": "fsdp=2", "ranks": []}, "ranks: expected at least one rank, got none"),
        ({"meshes": "fsdp=2", "ranks": [2]}, "ranks: expected ranks from 0 to 1, got 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", "\\[")):
        check_init(build, **arguments)


def test_blocks_of_fakes_are_refused() -> None:
    with fake_mode(), pytest.raises(RuntimeError, match="outside of fake_mode"):
        check_init(build, "fsdp=2")


@pytest.mark.ci
def test_program_that_fails_or_dies_is_reported() -> None:
    def failing() -> nn.Module:
        raise KeyError("missing")

    def waiting() -> nn.Module:
        dist.distributed_c10d._get_default_store().get("key of another rank")
        return build()

    def dying() -> nn.Module:
        os._exit(7)

    with pytest.raises(torchext.RankFailedError, match="in failing\n(.*\n)*KeyError: 'missing'"):
        check_init(failing, "fsdp=2")
    with pytest.raises(torchext.RankFailedError, match="rank 0 ended with exit code 7"):
        check_init(dying, "fsdp=2")
    with pytest.raises(torchext.RankFailedError, match="DistStoreError|imeout"):
        check_init(waiting, "fsdp=2")
    with pytest.raises(torchext.RankFailedError, match="needs a plan"):
        check_init(build, "tp=2", engine="tp")
    with pytest.raises(torchext.RankFailedError, match="`build`: expected a module, got int"):
        check_init(lambda: 1, "fsdp=2")  # type: ignore[arg-type,return-value]


def test_error_names_the_rank() -> None:
    def failing_in(number: int, size: int) -> nn.Module:
        if (rank(), int(os.environ["WORLD_SIZE"])) == (number, size):
            raise KeyError("missing")
        return build()

    with pytest.raises(torchext.RankFailedError, match=r"^The program failed in rank 1:\nTraceback(.*\n)*KeyError"):
        check_init(lambda: failing_in(1, 2), "fsdp=2")
    with pytest.raises(torchext.RankFailedError, match=r"^The program failed in the one process that"):
        check_init(lambda: failing_in(0, 1), "fsdp=2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the calls succeed on a GPU")
def test_error_of_a_device_says_that_ranks_run_on_the_cpu() -> None:
    def on_gpu() -> nn.Module:
        torch.cuda.set_device(rank())
        return build()

    def on_mesh_of_gpus() -> nn.Module:
        init_device_mesh("cuda", (2,))
        return build()

    for program in (on_gpu, on_mesh_of_gpus):
        with pytest.raises(torchext.RankFailedError, match="check-init runs on the CPU: use the mesh that is passed"):
            check_init(program, "fsdp=2")


def test_process_is_not_changed() -> None:
    state, environment = torch.get_rng_state(), dict(os.environ)
    check_init(rank_dependent_seed, "fsdp=2")
    assert torch.equal(torch.get_rng_state(), state)
    assert dict(os.environ) == environment
    assert not dist.is_initialized()


def test_rank_ends_with_the_process_that_checks(tmp_path: Path) -> None:
    def hanging(job: Job) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()

    def checking() -> None:
        run_rank(Job({"fsdp": 1}, 0, tmp_path), hanging)

    process = multiprocessing.get_context("fork").Process(target=checking)
    process.start()
    while not (file := tmp_path / "pid").exists() or not file.read_text():
        os.sched_yield()
    process.terminate()
    process.join()
    rank = Path(f"/proc/{file.read_text()}/stat")
    while rank.exists() and rank.read_text().rpartition(")")[2].split()[0] not in "ZX":  # an orphan would hang here
        os.sched_yield()


# ---- The command ----


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("function", "code"), [("build", 0), ("rank_dependent_seed", 3), ("missing", 2), ("fails", 1), ("depends", 4)]
)
def test_command_returns_the_verdict(
    function: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
        import os, torch, torch.distributed as dist
        def build(seed=0):
            print("constructing")
            torch.manual_seed(seed)
            return torch.nn.Linear(4, 4)
        def rank_dependent_seed():
            return build(int(os.environ["RANK"]))
        def fails():
            raise KeyError("missing")
        def depends():
            model = build()
            dist.all_reduce(model.weight.detach())
            return model
    """
    name = f"check_init_{function}"
    (tmp_path / f"{name}.py").write_text("\n".join(line[8:] for line in program.splitlines()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["check-init", f"{name}:{function}", "--mesh", "fsdp=2", "--mesh", "a=2,b=1", "--json", "-"]
    assert commands.main(arguments) == code
    printed = capsys.readouterr()
    if code in (0, 3, 4):
        report = json.loads(printed.out)
        assert (report["command"], report["exit_code"]) == ("check-init", code)
        assert [mesh["mesh"] for mesh in report["meshes"]] == [{"fsdp": 2}, {"a": 2, "b": 1}]
    else:
        assert printed.out == ""
        assert {1: "KeyError: 'missing'", 2: "has no attribute 'missing'"}[code] in printed.err


def test_module_that_exits_while_it_is_imported_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "without_main_guard.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert commands.main(["check-init", "without_main_guard:build", "--mesh", "fsdp=2"]) == 1
    assert 'put the code that runs the program under `if __name__ == "__main__":`' in capsys.readouterr().err


@pytest.mark.ci
def test_output_before_an_error_is_kept_and_messages_are_on_their_own_lines(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text("import os\ndef build():\n  print('before')\n  raise KeyError('missing')\n")
    (tmp_path / "dying.py").write_text("import os\ndef build():\n  os._exit(7)\n")
    errors = {}
    for name in ("failing", "dying"):
        command = [sys.executable, "-m", "torchext", "check-init", f"{name}:build", "--mesh", "fsdp=2"]
        errors[name] = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    assert errors["failing"].startswith("before\nThe program failed in rank 0:\n")
    assert errors["failing"].endswith("KeyError: 'missing'\ntorchext check-init: failing:build failed\n")
    assert errors["dying"].endswith("ended with exit code 7.\ntorchext check-init: dying:build failed\n")


def test_command_checks_ranges_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = """
        import os, torch
        def build():
            model = torch.nn.Linear(4, 4)
            torch.nn.init.constant_(model.bias, float(os.environ["RANK"]))
            return model
    """
    (tmp_path / "ranges.py").write_text("\n".join(line[8:] for line in program.splitlines()))
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["check-init", "ranges:build", "--mesh", "fsdp=4", "--rank", "0,2-3"]
    assert commands.main(arguments) == 3
    assert "3 of 4 ranks, 2 tensors: 1 differs from one process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ranks", "message"),
    [("0;1", "expected ranks such as 0,8-15; got '0;1'"), ("3-1", r"the range '3-1' is reversed. Did you mean 1-3\?")],
)
def test_command_refuses_wrong_ranks(ranks: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands.main(["check-init", "ranges:build", "--mesh", "fsdp=4", "--rank", ranks])
    assert re.search(message, capsys.readouterr().err)
