"""Work that may run on a GPU during a collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchext.dry_run import World, world

pytestmark = pytest.mark.usefixtures("empty_devices")


@pytest.fixture
def job() -> Iterator[World]:
    with world(64, 5) as made:
        yield made


def tensor() -> torch.Tensor:
    return torch.ones(4, device="cuda")


def test_nothing_overlaps_with_an_immediate_wait(job: World) -> None:
    dist.all_reduce(tensor())
    tensor()
    assert (job.collectives[0].stream, job.collectives[0].overlap, job.collectives[0].overlaps) == (0, 0, False)


def test_handle_is_waited_for_after_operators(job: World) -> None:
    work = dist.all_reduce(tensor(), async_op=True)
    tensor()
    tensor()
    assert work is not None
    work.wait()
    assert job.collectives[0].overlap == 2


def test_stream_is_waited_for_after_operators(job: World) -> None:
    given, stream = tensor(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dist.all_reduce(given)
    tensor()
    torch.cuda.current_stream().wait_stream(stream)
    tensor()
    assert (job.collectives[0].stream, job.collectives[0].overlap) == (stream.stream_id, 1)


def test_stream_that_waits_for_the_operators_does_not_overlap_with_them(job: World) -> None:
    given, stream = tensor(), torch.cuda.Stream()
    tensor()
    event = torch.cuda.Event()
    event.record()
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        dist.all_reduce(given)
        done = stream.record_event()
    done.wait()
    assert job.collectives[0].overlap == 0


def test_program_that_waits_for_the_device_has_nothing_left_to_overlap(job: World) -> None:
    given, stream = tensor(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        dist.all_reduce(given)
    torch.cuda.synchronize()
    tensor()
    waited = job.collectives[0]
    torch.cuda.current_stream().wait_stream(stream)
    assert job.collectives[0] == waited


def test_fsdp_gathers_a_layer_and_scatters_gradients_while_others_compute(job: World) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).cuda()
    mesh = init_device_mesh("cuda", (64,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 64, device="cuda")).sum().backward()
    gathered = [record for record in job.collectives if record.operator == "allgather_base"]
    scattered = [record for record in job.collectives if record.operator == "reduce_scatter_base"]
    assert {record.stream for record in gathered}.isdisjoint({record.stream for record in scattered} | {0})
    assert [record.overlaps for record in gathered[1:4]] == [True] * 3
    assert "forward of 1" in [str(place) for place in gathered[2].overlaps_with]
    assert all(record.overlap > 0 for record in scattered[:-1])
