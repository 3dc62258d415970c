"""PyTorch's collectives, as calls that make their tensors by a given function. For `test_collectives.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory  # defines operators
import torch.distributed.tensor  # the same
from torch import Tensor

Make = Callable[[int], Tensor]
Call = Callable[[Make, int], object]
"""Makes the call in a group of the given size, with tensors of as many elements as it requests."""


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def name() -> str:
    return group().group_name


def several(make: Make, n: int) -> list[Tensor]:
    return [make(4) for _ in range(n)]


def functional() -> Any:
    return torch.ops._c10d_functional


def ring(n: int) -> list[int]:
    return [(rank + 1) % n for rank in range(n)]


def batch(make: Make) -> list[dist.Work]:
    work = dist.batch_isend_irecv([dist.P2POp(dist.isend, make(4), 1), dist.P2POp(dist.irecv, make(4), 1)])
    return list(work)


def coalesced(make: Make, n: int) -> None:
    with dist._coalescing_manager(group=group(), device=torch.device("cpu")):
        dist.all_gather_into_tensor(make(4 * n), make(4))


C10D: dict[str, Call] = {
    "all_gather": lambda make, n: dist.all_gather(several(make, n), make(4)),
    "all_gather_coalesced": lambda make, n: group().allgather_coalesced([[make(4)] for _ in range(n)], [make(4)]),
    "all_gather_into_tensor": lambda make, n: dist.all_gather_into_tensor(make(4 * n), make(4)),
    "all_reduce": lambda make, n: dist.all_reduce(make(4)),
    "all_reduce_async": lambda make, n: dist.all_reduce(make(4), async_op=True),
    "all_reduce_coalesced": lambda make, n: group().allreduce_coalesced([make(4), make(4)]),
    "all_to_all": lambda make, n: dist.all_to_all(several(make, n), several(make, n)),
    "all_to_all_single": lambda make, n: dist.all_to_all_single(make(4 * n), make(4 * n)),
    "broadcast": lambda make, n: dist.broadcast(make(4), 0),
    "broadcast_coalesced": lambda make, n: dist._broadcast_coalesced(group(), several(make, 2), 1000, 0),
    "gather": lambda make, n: dist.gather(make(4), several(make, n)),
    "of_the_group": lambda make, n: group().allreduce([make(4)]),
    "recv": lambda make, n: group().recv([make(4)], 0, 0),
    "recv_from_any": lambda make, n: group().recv_anysource([make(4)], 0),
    "reduce": lambda make, n: dist.reduce(make(4), 0),
    "reduce_scatter": lambda make, n: dist.reduce_scatter(make(4), several(make, n)),
    "reduce_scatter_tensor": lambda make, n: dist.reduce_scatter_tensor(make(4), make(4 * n)),
    "scatter": lambda make, n: dist.scatter(make(4), several(make, n)),
    "send": lambda make, n: group().send([make(4)], 0, 0),
}

# Calls that gloo, or a group of one process, does not support.
OF_SEVERAL: dict[str, Call] = {
    "batch_isend_irecv": lambda make, n: batch(make),
    "coalescing_manager": coalesced,
    "irecv": lambda make, n: dist.irecv(make(4), 1),
    "isend": lambda make, n: dist.isend(make(4), 1),
}

FUNCTIONAL: dict[str, Call] = {
    "functional_all_gather": lambda make, n: functional().all_gather_into_tensor(make(4), n, name()),
    "functional_all_gather_coalesced": lambda make, n: functional().all_gather_into_tensor_coalesced(
        several(make, 2), n, name()
    ),
    "functional_all_reduce": lambda make, n: funcol.all_reduce(make(4), "sum", group()),
    "functional_all_reduce_coalesced": lambda make, n: funcol.all_reduce_coalesced([make(4)], "sum", group()),
    "functional_all_to_all": lambda make, n: functional().all_to_all_single(make(4 * n), [4] * n, [4] * n, name()),
    "functional_broadcast": lambda make, n: funcol.broadcast(make(4), 0, group()),
    "functional_permute": lambda make, n: funcol.permute_tensor(make(4), ring(n), group()),
    "functional_reduce_scatter": lambda make, n: functional().reduce_scatter_tensor(make(4 * n), "sum", n, name()),
    "in_place": lambda make, n: functional().all_reduce_(make(4), "sum", name()),
    "legacy": lambda make, n: torch.ops.c10d_functional.all_reduce(make(4), "sum", "", list(range(n)), n),
    "of_autograd": lambda make, n: torch.ops._c10d_functional_autograd.all_gather_into_tensor(make(4), n, name()),
    "of_dtensor": lambda make, n: torch.ops._dtensor.shard_dim_alltoall(make(n * n).view(n, n), 0, 1, name()),
    "out": lambda make, n: functional().all_gather_into_tensor_out(make(4), n, name(), out=make(4 * n)),
}

SYMMETRIC: dict[str, Call] = {
    "symmetric_one_shot": lambda make, n: torch.ops.symm_mem.one_shot_all_reduce(make(4), "sum", name()),
    "symmetric_two_shot": lambda make, n: torch.ops.symm_mem.two_shot_all_reduce_(make(4), "sum", name()),
    "symmetric_gather": lambda make, n: torch.ops.symm_mem._low_contention_all_gather(make(4), name()),
}

# Calls that take real tensors together with the others, as inputs or outputs.
MIXED: dict[str, Call] = {
    "all_gather_to_real": lambda make, n: dist.all_gather(several(torch.zeros, n), make(4)),
    "all_gather_of_real": lambda make, n: dist.all_gather(several(make, n), torch.zeros(4)),
    "all_gather_into_real": lambda make, n: dist.all_gather_into_tensor(torch.zeros(4 * n), make(4)),
    "gather_to_real": lambda make, n: dist.gather(make(4), several(torch.zeros, n)),
    "gather_of_real": lambda make, n: dist.gather(torch.zeros(4), several(make, n)),
    "reduce_scatter_to_real": lambda make, n: dist.reduce_scatter(torch.zeros(4), several(make, n)),
    "reduce_scatter_of_real": lambda make, n: dist.reduce_scatter_tensor(make(4), torch.zeros(4 * n)),
    "scatter_to_real": lambda make, n: dist.scatter(torch.zeros(4), several(make, n)),
    "scatter_of_real": lambda make, n: dist.scatter(make(4), several(torch.zeros, n)),
}
