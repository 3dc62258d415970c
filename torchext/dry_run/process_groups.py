"""Process groups without the other ranks, under the backend names that a program uses.

They use PyTorch's backend `fake` (`FakeProcessGroup.hpp`), on the devices that the named backend serves, so PyTorch
itself rejects other devices. Rendezvous, barriers and the store do not wait for other ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, BackendConfig, GroupMember

from ..internals.dispatch_keys import without_our_keys
from .current import current, while_world_is_open
from .late_imports import patch_late_imports
from .nccl import NCCL_TIMEOUT, NCCL_VERSION
from .objects import OBJECT_COLLECTIVES

__all__ = ["initialize"]


def initialize(backend: str) -> None:
    """Initialize the default process group of the open world."""
    dist.init_process_group(backend)


def _install() -> None:
    import torch.testing._internal.distributed.fake_pg

    patch = while_world_is_open.patch
    waits = "waits for ranks that do not exist"
    patch(distributed_c10d, "_new_process_group_helper", _with_fake_backend, "constructs backends that communicate")
    patch(distributed_c10d, "init_process_group", _replacing_the_first, "rejects a second default group")
    patch(distributed_c10d, "rendezvous", _rendezvous_alone, waits)
    patch(distributed_c10d, "_get_default_timeout", _of_any_backend, "warns that this PyTorch has no NCCL")
    patch(distributed_c10d, "_set_pg_timeout", _having_no_timeout, "sets the timeouts of backends that communicate")
    patch(distributed_c10d, "_store_based_barrier", _doing_nothing, waits)
    patch(distributed_c10d, "monitored_barrier", _monitoring_alone, waits)
    patch(distributed_c10d, "split_group", _making_new_groups, "splits NCCL communicators")
    patch(distributed_c10d, "is_nccl_available", _with_fake_gpus(True), "is false for a PyTorch without NCCL")
    patch(torch.cuda.nccl, "version", _with_fake_gpus(NCCL_VERSION), "calls NCCL, which may be missing")
    for name in ("all_gather_into_tensor", "all_gather_single"):
        if name in vars(distributed_c10d):
            patch(distributed_c10d, name, _gathering_flat, "splits the output along its first dimension")
    for name, replacement in OBJECT_COLLECTIVES.items():
        patch(distributed_c10d, name, _always(replacement), "reads pickled objects of other ranks from tensors")


while_world_is_open.declare(_install)


def _always(replacement: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: replacement


def _doing_nothing(original: Callable[..., Any]) -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _of_any_backend(original: Callable[..., timedelta]) -> Callable[..., timedelta]:
    def _get_default_timeout(backend: str) -> timedelta:
        return NCCL_TIMEOUT if backend == Backend.NCCL else original(backend)

    return _get_default_timeout


def _having_no_timeout(original: Callable[..., None]) -> Callable[..., None]:
    def _set_pg_timeout(timeout: timedelta, group: dist.ProcessGroup | None = None) -> None:
        if distributed_c10d._rank_not_in_group(group):
            raise ValueError("Invalid process group specified")

    return _set_pg_timeout


def _with_fake_gpus(answer: object) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a maker of functions that return `answer` if the world has GPUs."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            world = current()
            return answer if world is not None and world.gpu is not None else original(*args, **kwargs)

        return function

    return make


def _with_fake_backend(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def _new_process_group_helper(*args: Any, **kwargs: Any) -> Any:
        patch_late_imports()
        given = signature.bind(*args, **kwargs)
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

    return _new_process_group_helper


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


def _gathering_flat(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gather into any shape with the right number of elements, as real backends do and `SyncBatchNorm` relies on."""

    def all_gather(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_cut_elsewhere = output_tensor.shape[1:] != input_tensor.shape[1:] and output_tensor.is_contiguous()
        if current() is not None and is_cut_elsewhere:
            output_tensor, input_tensor = output_tensor.view(-1), input_tensor.reshape(-1)
        return original(output_tensor, input_tensor, *args, **kwargs)

    return all_gather


def _replacing_the_first(original: Callable[..., None]) -> Callable[..., None]:
    """Replace the default group of the world when the program initializes its own."""

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        world = current()
        if world is not None and world.has_own_group and dist.is_initialized():
            world.has_own_group = False
            dist.destroy_process_group()
        with without_our_keys():
            original(*args, **kwargs)

    return init_process_group


def _rendezvous_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
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

    return rendezvous


def _monitoring_alone(original: Callable[..., None]) -> Callable[..., None]:
    def monitored_barrier(
        group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        if distributed_c10d._rank_not_in_group(group):
            return
        if dist.get_backend(group) != Backend.GLOO:
            raise ValueError("monitored_barrier is only implemented for GLOO backend.")

    return monitored_barrier


def _making_new_groups(original: Callable[..., Any]) -> Callable[..., Any]:
    def split_group(
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

    return split_group
