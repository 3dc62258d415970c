"""Collectives of known values return the result for equal values on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from torchext.dry_run import World, world
from torchext.fake import DataDependentError

SIZE, RANK = 8, 3


@pytest.fixture
def job() -> Iterator[World]:
    with world(SIZE, RANK, gpu="A100-40GB", values="assume") as job:
        yield job


def known(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda")


def empty(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.int64, device="cuda")


def written(write: Callable[[Tensor], object], tensor: Tensor) -> list[int]:
    write(tensor)
    return tensor.tolist()  # type: ignore[no-any-return]


CALLS: dict[str, tuple[Callable[[], object], object]] = {
    "sum": (lambda: written(dist.all_reduce, known(1, 2)), [8, 16]),
    "maximum": (lambda: written(lambda t: dist.all_reduce(t, dist.ReduceOp.MAX), known(1, 2)), [1, 2]),
    "minimum": (lambda: written(lambda t: dist.all_reduce(t, dist.ReduceOp.MIN), known(1)), [1]),
    "product": (lambda: written(lambda t: dist.all_reduce(t, dist.ReduceOp.PRODUCT), known(2)), [256]),
    "to one": (lambda: written(lambda t: dist.reduce(t, 0), known(2)), [16]),
    "broadcast": (lambda: written(lambda t: dist.broadcast(t, 0), known(4, 5)), [4, 5]),
    "a part": (lambda: written(lambda t: dist.all_reduce(t[1:]), known(1, 2)), [1, 16]),
    "gathered in a list": (
        lambda: [t.tolist() for t in gathered([empty(1) for _ in range(SIZE)], known(7))],
        [[7]] * SIZE,
    ),
    "gathered in rows": (lambda: torch.stack(gathered([*empty(SIZE, 2).unbind()], known(7, 9))).tolist(), [[7, 9]] * 8),
    "gathered": (
        lambda: written(lambda t: dist.distributed_c10d._all_gather_base(t, known(7, 9)), empty(16)),
        [7, 9] * SIZE,
    ),
    "scattered sum": (
        lambda: written(
            lambda t: dist.distributed_c10d._reduce_scatter_base(t, torch.arange(8, device="cuda")), empty(1)
        ),
        [RANK * SIZE],
    ),
    "exchanged": (
        lambda: written(lambda t: dist.all_to_all_single(t, torch.arange(8, device="cuda")), empty(8)),
        [RANK] * SIZE,
    ),
    "exchanged by unequal parts": (
        lambda: written(
            lambda t: dist.all_to_all_single(t, torch.arange(9, device="cuda"), [2] * SIZE, [1, 1, 1, 2, 1, 1, 1, 1]),
            empty(16),
        ),
        [RANK, RANK + 1] * SIZE,
    ),
    "gathered by a functional collective": (
        lambda: functional.all_gather_tensor(known(1, 2), 0, dist.group.WORLD).tolist(),
        [1, 2] * SIZE,
    ),
    "functional": (lambda: functional.all_reduce(known(1, 2), "sum", dist.group.WORLD).tolist(), [8, 16]),
}


def gathered(tensors: list[Tensor], tensor: Tensor) -> list[Tensor]:
    dist.all_gather(tensors, tensor)
    return tensors


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", CALLS)
def test_result_is_that_of_equal_processes(name: str, job: World) -> None:
    call, wanted = CALLS[name]
    assert call() == wanted
    assert job.values, "other processes may have other values"


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("name", CALLS)
def test_result_is_unknown_where_nothing_is_assumed(name: str) -> None:
    with world(SIZE, RANK, gpu="A100-40GB", values="raise"), pytest.raises((DataDependentError, RuntimeError)):
        CALLS[name][0]()


def test_messages_of_other_processes_are_assumed(job: World) -> None:
    tensor = known(3)
    dist.recv(tensor, src=0)
    assert tensor.tolist() == [3], "as if it had what this one has"
    assert job.values


def test_rank_that_sends_nothing_receives(job: World) -> None:
    received = torch.empty(2 * SIZE, 4, device="cuda")
    dist.all_to_all_single(received, received.new_empty(0, 4), [2] * SIZE, [0] * SIZE)
    assert [call.bytes_received for call in job.collectives] == [received.nbytes]


def test_sum_of_unknown_values_is_unknown(job: World) -> None:
    loss = torch.empty(1, device="cuda")
    dist.all_reduce(loss)
    assert loss.item() == 0.125
