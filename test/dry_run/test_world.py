"""The world of a dry run: environment, process groups under every name, waits without a peer, records."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from torchext.dry_run import Place, World, world
from torchext.dry_run.simulated_world import job_of
from torchext.fake import FakeGPU, is_fake

SIZE, RANK = 1024, 511


@pytest.fixture
def job() -> Iterator[World]:
    with world(SIZE, RANK) as job:
        yield job


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def test_environment_is_that_of_torchrun_in_the_block_only() -> None:
    before = dict(os.environ)
    with world(SIZE, RANK):
        found = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
        assert found == {"RANK": RANK, "WORLD_SIZE": SIZE, "LOCAL_RANK": 7, "LOCAL_WORLD_SIZE": 8}
        assert (os.environ["GROUP_RANK"], os.environ["GROUP_WORLD_SIZE"]) == ("63", "128")
        assert dist.is_torchelastic_launched()
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("size", "rank", "per_node", "on_node"), [(10, 9, 8, 2), (10, 7, 8, 8), (3, 2, 8, 3), (6, 5, 4, 2)]
)
def test_last_machine_may_have_fewer_processes(size: int, rank: int, per_node: int, on_node: int) -> None:
    with world(size, rank, per_node=per_node):
        assert os.environ["LOCAL_WORLD_SIZE"] == str(on_node)
        assert torch.cuda.device_count() == min(per_node, size)


def test_gpus_are_those_of_one_machine_and_the_local_rank_is_current(job: World) -> None:
    assert torch.cuda.device_count() == 8
    assert torch.cuda.current_device() == job.local_rank == 7
    assert "H100" in torch.cuda.get_device_name()
    assert is_fake(on_gpu(2))


def test_current_device_stays_the_first_on_request() -> None:
    with world(SIZE, RANK, FakeGPU("A100-40GB"), set_device=False):
        assert torch.cuda.current_device() == 0


def test_world_without_gpus() -> None:
    with world(8, 3, gpu=None):
        assert not torch.cuda.is_available()
        assert dist.get_backend() == "gloo"
        dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("backend", "init_method", "found"),
    [
        ("nccl", None, "nccl"),
        ("gloo", "env://", "gloo"),
        ("cpu:gloo,cuda:nccl", None, "cpu:gloo,cuda:nccl"),
        ("nccl", "tcp://10.1.1.20:23456", "nccl"),
        (None, None, "undefined"),
    ],
)
def test_backend_is_the_requested_one(job: World, backend: str | None, init_method: str | None, found: str) -> None:
    ranks = {} if init_method is None or "tcp" not in init_method else {"rank": RANK, "world_size": SIZE}
    dist.init_process_group(backend, init_method=init_method, **ranks)  # type: ignore[arg-type]
    assert dist.get_backend() == found
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, SIZE)
    dist.all_reduce(on_gpu(2))
    assert dist.get_backend(dist.new_group([0, RANK])) == found


def test_group_with_a_bound_device_makes_meshes_and_splits(job: World) -> None:
    dist.init_process_group("nccl", device_id=torch.device("cuda", job.local_rank))
    mesh = init_device_mesh("cuda", (SIZE // 8, 8), mesh_dim_names=("dp", "tp"))
    assert dist.get_process_group_ranks(mesh["tp"].get_group()) == list(range(504, 512))
    group = dist.split_group(split_ranks=[list(range(256)), list(range(256, 1024))])
    assert group is not None
    assert group.size() == 768


def test_backend_refuses_the_devices_that_it_does_not_serve(job: World) -> None:
    dist.init_process_group("nccl")
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("device_ids", [None, [7]])
def test_barrier_returns_on_the_device_of_its_backend(job: World, device_ids: list[int] | None) -> None:
    dist.init_process_group("nccl")
    dist.barrier(device_ids=device_ids)
    assert [(record.operator, record.device) for record in job.collectives[-1:]] == [("barrier", "cuda:7")]


def test_place_of_a_collective_may_be_a_module_without_truth_value(job: World) -> None:
    class Odd(nn.Module):
        """Mimics the `OptimizedModule` of a module without a length."""

        def __len__(self) -> int:
            raise TypeError("does not support len()")

        def forward(self) -> None:
            dist.all_reduce(on_gpu(2))

    Odd()()
    assert job.collectives[-1].issued_in.module == "Odd"


def test_names_of_nccl_are_there_in_the_block_only() -> None:
    before = hasattr(dist, "ProcessGroupNCCL")
    with world(8):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", pg_options=options)
        group = dist.new_group([0, 1], pg_options=options, backend="nccl")
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), group)
        with pytest.raises(ValueError, match="Invalid process group specified"):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=30), dist.new_group([1, 2]))
        dist.distributed_c10d._abort_process_group()
    assert hasattr(dist, "ProcessGroupNCCL") == before


def test_second_default_group_of_the_program_is_refused(job: World) -> None:
    dist.init_process_group("nccl")
    with pytest.raises(ValueError, match="default process group twice"):
        dist.init_process_group("nccl")
    dist.destroy_process_group()
    dist.init_process_group("gloo")


def test_rank_of_the_program_has_to_be_that_of_the_dry_run(job: World) -> None:
    with pytest.raises(ValueError, match=r"with rank=0, but this is a dry run of rank 511 of 1024"):
        dist.init_process_group("nccl", init_method="tcp://10.1.1.20:23456", rank=0, world_size=SIZE)


def test_no_group_until_the_program_makes_one() -> None:
    with world(8, backend=None):
        assert not dist.is_initialized()
        dist.init_process_group()
        assert dist.get_world_size() == 8
    assert not dist.is_initialized()


def test_worlds_do_not_nest(job: World) -> None:
    message = "A world is already open in this process, as rank 511 of 1024, and only one can be open"
    with pytest.raises(RuntimeError, match=message), world(2):
        pass
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=message), world(2):
        pass


def test_world_refuses_the_process_group_of_the_program() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="This process already has a default process group"), world(2):
            pass
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("size", "rank"), [(0, 0), (4, 4), (4, -1)])
def test_rank_has_to_be_in_the_world(size: int, rank: int) -> None:
    with pytest.raises(ValueError, match="has no rank"):
        world(size, rank)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 1.5}, "`size`: expected an int, got 1.5"),
        ({"size": "8"}, "`size`: expected an int, got '8'"),
        ({"rank": 1.5}, "`rank`: expected an int, got 1.5"),
        ({"per_node": None}, "`per_node`: expected an int, got None"),
    ],
    ids=str,
)
def test_numbers_have_to_be_ints(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        world(**{"size": 8, **arguments})


def test_generators_are_not_decorated() -> None:
    def steps() -> Iterator[int]:
        yield dist.get_world_size()

    with pytest.raises(TypeError, match=r"@world\(\) does not decorate generators and coroutines"):
        world(2, gpu=None)(steps)


def test_decorated_function_has_a_world_for_each_call() -> None:
    @world(16, 5)
    def rank() -> int:
        return dist.get_rank()

    assert [rank(), rank()] == [5, 5]
    assert not dist.is_initialized()


def test_store_returns_set_values_and_rejects_unset_ones(job: World) -> None:
    dist.init_process_group("nccl")
    store = dist.distributed_c10d._get_default_store()
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert store.add("count", 2) == 2
    assert store.add("count", 3) == 5
    assert store.check(["key"])
    with pytest.raises(RuntimeError, match=r"waits for the key '.*other' of the store.* rank 511 of 1024 runs alone"):
        store.get("other")
    with pytest.raises(RuntimeError, match="waits for the key"):
        store.wait(["other"])


def test_barriers_do_not_wait(job: World) -> None:
    dist.barrier()
    with pytest.raises(ValueError, match="monitored_barrier is only implemented for GLOO"):
        dist.monitored_barrier()
    dist.monitored_barrier(dist.new_group(backend="gloo"))


def test_objects_of_others_are_those_of_this_rank(job: World) -> None:
    dist.init_process_group("nccl")
    gathered: list[object] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": RANK})
    assert gathered == [{"rank": RANK}] * SIZE
    assert gathered[0] is not gathered[1]
    own = [{"a": 1}]
    dist.broadcast_object_list(own, src=0)
    assert own == [{"a": 1}]
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, list(range(SIZE)), src=0)
    assert scattered == [RANK]
    dist.send_object_list([1], dst=0)


@pytest.mark.parametrize(
    "receive",
    [lambda: dist.recv_object_list([None], src=0), lambda: dist.scatter_object_list([None], None, src=0)],
    ids=["recv", "scatter"],
)
def test_object_of_another_rank_is_an_error(job: World, receive: object) -> None:
    with pytest.raises(RuntimeError, match="returns objects of rank 0 of the group, which does not run"):
        receive()  # type: ignore[operator]


def test_object_that_cannot_be_pickled_is_refused(job: World) -> None:
    with pytest.raises((AttributeError, TypeError), match="pickle"):
        dist.all_gather_object([None] * SIZE, lambda: None)


def test_record_of_a_collective(job: World) -> None:
    work = dist.all_reduce(on_gpu(4), dist.ReduceOp.AVG, async_op=True)
    assert job.collectives[0].waited_in is None
    assert work is not None
    work.wait()
    (record,) = job.collectives
    assert (record.operator, record.group, record.group_size) == ("allreduce", "world", SIZE)
    assert (record.bytes_sent, record.bytes_received, record.dtype) == (16, 16, "torch.float32")
    assert (record.reduction, record.device, record.is_async) == ("AVG", "cuda:7", True)
    assert record.waited_in == Place("", "")
    assert not record.overlaps


@pytest.mark.parametrize(
    ("call", "operator", "given", "received"),
    [
        (lambda: dist.all_gather_into_tensor(on_gpu(SIZE * 2), on_gpu(2)), "allgather_base", 8, 8 * SIZE),
        (lambda: dist.reduce_scatter_tensor(on_gpu(2), on_gpu(SIZE * 2)), "reduce_scatter_base", 8 * SIZE, 8),
        (lambda: dist.all_to_all_single(on_gpu(SIZE), on_gpu(SIZE)), "alltoall_base", 4 * SIZE, 4 * SIZE),
        (lambda: dist.all_gather([on_gpu(3) for _ in range(SIZE)], on_gpu(3)), "allgather", 12, 12 * SIZE),
        (lambda: dist.send(on_gpu(3), 0), "send", 12, 0),
        (lambda: dist.recv(on_gpu(3), 0), "recv", 0, 12),
        (lambda: dist.broadcast(on_gpu(3), 0), "broadcast", 12, 12),
    ],
)
def test_bytes_of_each_operator(job: World, call: object, operator: str, given: int, received: int) -> None:
    call()  # type: ignore[operator]
    (record,) = job.collectives
    assert (record.operator, record.bytes_sent, record.bytes_received) == (operator, given, received)


def test_group_is_named_by_the_dimension_of_its_mesh(job: World) -> None:
    mesh = init_device_mesh("cuda", (SIZE // 8, 8), mesh_dim_names=("dp", "tp"))
    dist.all_reduce(on_gpu(1), group=mesh["tp"].get_group())
    assert (job.collectives[0].group, job.collectives[0].ranks) == ("tp", tuple(range(504, 512)))


def test_record_of_a_functional_collective_has_the_place_of_its_wait(job: World) -> None:
    class Reducing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return funcol.all_reduce(x, "sum", dist.group.WORLD)

    result = Reducing()(on_gpu(4))
    assert isinstance(result, funcol.AsyncCollectiveTensor)
    assert job.collectives[0].issued_in == Place("Reducing", "forward")
    assert job.collectives[0].waited_in is None
    result + 1
    assert job.collectives[0].waited_in == Place("", "")
    assert job.collectives[0].overlaps


def test_line_is_recorded_on_request() -> None:
    with world(8, trace=True) as job:
        dist.all_reduce(on_gpu(1))
    assert job.collectives[0].line.endswith("in test_line_is_recorded_on_request")


@pytest.mark.parametrize(("values", "result"), [("raise", 1), ("assume", 8)])
def test_collectives_of_real_tensors_are_recorded(values: str, result: int) -> None:
    real = torch.ones(4)
    with world(8, values=values) as job:
        dist.all_reduce(real)
    assert job.collectives[0].bytes_sent == 16
    assert torch.equal(real, torch.full((4,), float(result)))


def test_summary_adds_up_by_group_and_operator(job: World) -> None:
    for numel in (1, 2, 3):
        dist.all_reduce(on_gpu(numel))
    dist.broadcast(on_gpu(1), 0)
    assert [(row.operator, row.calls, row.bytes_sent) for row in job.summary()] == [
        ("allreduce", 3, 24),
        ("broadcast", 1, 4),
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.all_gather_into_tensor(on_gpu(SIZE), on_gpu(2)), "world_size times input tensor size"),
        (lambda: dist.all_gather_into_tensor(on_gpu(SIZE), on_gpu(1).half()), "same type as input tensor"),
        (lambda: dist.reduce_scatter_tensor(on_gpu(2), on_gpu(SIZE)), "output size times world size"),
        (lambda: dist.all_to_all_single(on_gpu(SIZE + 1), on_gpu(SIZE + 1)), "does not divide equally"),
        (lambda: dist.all_to_all_single(on_gpu(4), on_gpu(4), [2, 2], [2, 2]), "splits not equal to group size"),
        (lambda: dist.all_gather([on_gpu(3)], on_gpu(3)), "same length as the number of ranks|number of ranks"),
        (lambda: dist.broadcast(on_gpu(3), SIZE), "not part of group|invalid root_rank|Global rank"),
        (lambda: dist.all_reduce_coalesced([on_gpu(1), on_gpu(1).half()]), "different dtypes"),
        (lambda: dist.send(on_gpu(1), RANK), "same as the rank of the current process|itself"),
    ],
)
def test_calls_that_a_backend_rejects_raise(job: World, call: object, message: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        call()  # type: ignore[operator]
    assert not job.collectives


def test_a_world_shows_the_job_and_its_records_only(job: World) -> None:
    assert {name for name in dir(job) if not name.startswith("_")} == {
        *("size", "rank", "local_rank", "per_node", "gpu"),
        *("collectives", "summary", "values", "value_remarks", "latest_value", "remarks", "to_dict"),
    }


def test_worlds_are_freed_after_the_block() -> None:
    worlds = []
    for _ in range(2):
        with world(2, 0) as job:
            dist.all_reduce(torch.ones(2))
            worlds.append(weakref.ref(job_of(job).recorder))
        del job
    gc.collect()
    assert [freed() for freed in worlds] == [None, None]


def test_worlds_follow_each_other_with_distributed_tensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for rank in (0, 9):
        with world(16, rank):
            mesh = init_device_mesh("cuda", (16,))
            tensor = distribute_tensor(on_gpu(32, 2), mesh, [Shard(0)], src_data_rank=None)
            assert tensor.redistribute(placements=[Replicate()]).to_local().shape == (32, 2)


@pytest.mark.parametrize("gpu", ["A100", 4, FakeGPU("A100-40GB"), None], ids=str)
def test_gpu_is_a_name_a_count_a_description_or_none(gpu: str | int | FakeGPU | None) -> None:
    made = world(1, gpu=gpu)
    assert (made.gpu is None) == (gpu is None)
    assert made.gpu is None or made.gpu.count == (4 if gpu == 4 else 1)


def test_values_are_assumed_as_on_the_command_line() -> None:
    with world(8) as job:
        assert torch.randn((), device="cuda").item() == 0.125
    assert [site.answer for site in job.values] == ["0.125"]


def test_results_are_shown_as_text_html_and_json() -> None:
    with world(8, 3) as job:
        dist.all_reduce(on_gpu(4))
    assert repr(job) == "<World: rank 3 of 8, 8 x NVIDIA H100 80GB HBM3, collectives: 1, assumed values: 0>"
    lines = str(job.summary()).splitlines()
    assert lines[0].split() == ["group", "ranks", "operator", "calls", "sent", "received"]
    assert lines[-1].split() == ["world", "8", "allreduce", "1", "16", "B", "16", "B"]
    assert "<td>allreduce</td>" in job._repr_html_()
    found = json.loads(json.dumps(job.to_dict()))
    assert found["collectives"][0]["issued_in"] == {"module": "", "phase": ""}
    assert found["gpu"]["name"] == "NVIDIA H100 80GB HBM3"
    assert job.summary().to_dict()["rows"][0]["bytes_sent"] == 16
