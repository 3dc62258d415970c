"""Process groups without the other ranks, under the backend names that a program uses.

They use PyTorch's backend `fake` (`FakeProcessGroup.hpp`), on the devices that the named backend serves, so PyTorch
itself rejects other devices. Rendezvous, barriers and the store do not wait for other ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, BackendConfig, GroupMember

from ..internals.dispatch_keys import without_our_keys
from ..internals.patching import Function
from .current import current, while_world_is_open
from .nccl import NCCL_TIMEOUT, NCCL_VERSION

__all__ = ["initialize"]


def initialize(backend: str) -> None:
    """Initialize the default process group of the open world."""
    dist.init_process_group(backend)


def _register_backend() -> None:
    """Import the module that registers PyTorch's backend `fake`."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


while_world_is_open.declare(_register_backend)

replaces = partial(while_world_is_open.replaces, distributed_c10d)


# ---- Barriers, timeouts, and NCCL


WAITS = "waits for ranks that do not exist"


@replaces("_store_based_barrier", reason=WAITS)
def _store_based_barrier(original: Function, /, *args: Any, **kwargs: Any) -> None:
    pass


@replaces("monitored_barrier", reason=WAITS)
def _monitored_barrier(
    original: Function,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    if distributed_c10d._rank_not_in_group(group):
        return
    if dist.get_backend(group) != Backend.GLOO:
        raise ValueError("monitored_barrier is only implemented for GLOO backend.")


@replaces("_get_default_timeout", reason="warns that this PyTorch has no NCCL")
def _get_default_timeout(original: Function, backend: str) -> Any:
    return NCCL_TIMEOUT if backend == Backend.NCCL else original(backend)


@replaces("_set_pg_timeout", reason="sets the timeouts of backends that communicate")
def _set_pg_timeout(original: Function, timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
    if distributed_c10d._rank_not_in_group(group):
        raise ValueError("Invalid process group specified")


def _answer_with_gpus(answer: object, original: Function, /, *args: Any, **kwargs: Any) -> Any:
    world = current()
    return answer if world is not None and world.gpu is not None else original(*args, **kwargs)


replaces("is_nccl_available", reason="is false for a PyTorch without NCCL")(partial(_answer_with_gpus, True))
while_world_is_open.replaces(torch.cuda.nccl, "version", reason="calls NCCL, which may be missing")(
    partial(_answer_with_gpus, NCCL_VERSION)
)


# ---- Construction


@replaces("_new_process_group_helper", reason="constructs backends that communicate")
def _new_process_group_helper(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    backend = given.arguments["backend"]
    served = BackendConfig(Backend(backend)).get_device_backend_map()
    given.arguments["backend"] = Backend(",".join(f"{device}:{Backend.FAKE}" for device in served))
    # These are for NCCL communicators.
    given.arguments["backend_options"] = given.arguments["device_id"] = None
    known = set(distributed_c10d._world.pg_map)
    made = original(*given.args, **given.kwargs)
    group = made[0]
    if group != GroupMember.NON_GROUP_MEMBER and group not in known:
        _rename(group, backend)
        _note(group, given.arguments["global_ranks_in_group"])
    return made


def _note(group: dist.ProcessGroup, ranks: list[int]) -> None:
    world = current()
    if world is not None and world.messages is not None:
        world.messages.note_group(str(group.group_name), ranks or range(world.size))


def _rename(group: dist.ProcessGroup, backend: str) -> None:
    """Enter the backend of the program in PyTorch's tables."""
    world = distributed_c10d._world
    world.pg_map[group] = (Backend(backend), world.pg_map[group][1])
    world.pg_backend_config[group] = str(BackendConfig(Backend(backend)))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # the original uses another spelling


@replaces("init_process_group", reason="rejects a second default group")
def _init_process_group(original: Function, /, *args: Any, **kwargs: Any) -> None:
    """Replace the default group of the world when the program initializes its own."""
    world = current()
    if world is not None and world.has_own_group and dist.is_initialized():
        world.has_own_group = False
        dist.destroy_process_group()
    with without_our_keys():
        original(*args, **kwargs)


@replaces("rendezvous", reason=WAITS)
def _rendezvous(
    original: Function, /, url: str, rank: int = -1, world_size: int = -1, **kwargs: Any
) -> Iterator[tuple[Any, int, int]]:
    world = current()
    if world is None or not isinstance(url, str):
        yield from original(url, rank, world_size, **kwargs)
        return
    query = parse_qs(urlparse(url).query)
    given_rank = int(query["rank"][0]) if "rank" in query else rank
    given_size = int(query["world_size"][0]) if "world_size" in query else world_size
    for name, given, own in (("rank", given_rank, world.rank), ("world_size", given_size, world.size)):
        if given not in (-1, own):
            raise ValueError(
                f"The program initializes the default process group with {name}={given}, but this is a dry run of "
                f"rank {world.rank} of {world.size}. Read both from the environment (RANK, WORLD_SIZE), as under "
                "torchrun, or start the dry run with the rank and the size of the program."
            )
    yield world.store, world.rank, world.size


@replaces("split_group", reason="splits NCCL communicators")
def _split_group(
    original: Function,
    /,
    parent_pg: dist.ProcessGroup | None = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    *args: Any,
    **kwargs: Any,
) -> dist.ProcessGroup | None:
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    parent = parent_pg or dist.group.WORLD
    ranks_of_parent = dist.get_process_group_ranks(parent)
    own = None
    for ranks in split_ranks:
        group = dist.new_group(
            [ranks_of_parent[rank] for rank in ranks],
            timeout,
            dist.get_backend(parent),
            group_desc=group_desc,
        )
        if group != GroupMember.NON_GROUP_MEMBER:
            own = group
    return own


# ---- Collectives


SPLITS = "splits the output along its first dimension"


@replaces("all_gather_single", needs="all_gather_single", reason=SPLITS)  # since 2.13
@replaces("all_gather_into_tensor", needs="all_gather_into_tensor", reason=SPLITS)
def _all_gather(original: Function, /, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Gather into any shape with the right number of elements, as real backends do and `SyncBatchNorm` relies on."""
    is_cut_elsewhere = output_tensor.shape[1:] != input_tensor.shape[1:] and output_tensor.is_contiguous()
    if current() is not None and is_cut_elsewhere:
        output_tensor, input_tensor = output_tensor.view(-1), input_tensor.reshape(-1)
    return original(output_tensor, input_tensor, *args, **kwargs)
