"""Collectives of Python objects, where the other processes do not exist: each of them says what this one says.

A real object collective pickles objects into tensors, on the device of the group. Here they are pickled all the same,
so that what cannot be pickled fails, and what comes back is a copy.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

__all__ = ["OBJECT_COLLECTIVES", "root_saying"]

_said_by_root: list[list[Any]] = []


@contextmanager
def root_saying(objects: list[Any]) -> Iterator[None]:
    """Has the root of a broadcast say `objects` in the block, where it is known what it would say."""
    _said_by_root.append(objects)
    try:
        yield
    finally:
        _said_by_root.pop()


def _copies(value: object, count: int) -> list[Any]:
    """What `count` processes would say, as they would be received."""
    stream = io.BytesIO()
    distributed_c10d._pickler(stream).dump(value)
    data = stream.getvalue()
    return [pickle.loads(data) for _ in range(count)]


def _is_outside(group: dist.ProcessGroup | None) -> bool:
    return distributed_c10d._rank_not_in_group(group)


def _peer(global_rank: int | None, group_rank: int | None, group: dist.ProcessGroup | None) -> int:
    """The rank in the group, checked as PyTorch does."""
    in_group = group or distributed_c10d._get_default_group()
    return int(distributed_c10d._canonicalize_group_rank(in_group, global_rank, group_rank))


def _all_gather_object(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    if not _is_outside(group):
        for i, copy in enumerate(_copies(obj, dist.get_world_size(group))):
            object_list[i] = copy


def _gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    if _is_outside(group):
        return
    if dst is None and group_dst is None:
        dst = 0
    rank = dist.get_rank(group)
    root = _peer(dst, group_dst, group)
    distributed_c10d._validate_output_list_for_rank(rank, root, object_gather_list)
    copies = _copies(obj, dist.get_world_size(group) if rank == root else 1)
    if rank == root and object_gather_list is not None:
        object_gather_list[: len(copies)] = copies


def _broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    if _is_outside(group):
        return
    if src is None and group_src is None:
        src = 0
    _peer(src, group_src, group)
    if not object_list:
        raise IndexError("list index out of range")  # as the original does of the sizes
    if _said_by_root:
        object_list[:] = _said_by_root[-1]
        return
    object_list[:] = [copy for value in object_list for copy in _copies(value, 1)]


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    if _is_outside(group):
        return
    if not isinstance(scatter_object_output_list, list) or len(scatter_object_output_list) < 1:
        raise ValueError("Expected argument scatter_object_output_list to be a list of size at least 1.")
    if src is None and group_src is None:
        src = 0
    root = _peer(src, group_src, group)
    rank = dist.get_rank(group)
    given = scatter_object_input_list
    if given is None or len(given) != dist.get_world_size(group):
        if rank == root:
            raise ValueError("source rank must provide non-None scatter_object_input_list")
        raise _unknown("scatter_object_list()", root, "Give it the list on all ranks: the others ignore it in a job.")
    scatter_object_output_list[0] = _copies(given[rank], 1)[0]


def _send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    if not _is_outside(group):
        _peer(dst, group_dst, group)
        _copies(object_list, 1)


def _recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    if _is_outside(group):
        return -1
    sender = 0 if src is None and group_src is None else _peer(src, group_src, group)
    raise _unknown(
        "recv_object_list()",
        sender,
        "A pipeline stage needs none if its PipelineStage is given `input_args` and `output_args`, of fake tensors or "
        "tensors on the device `meta`.",
    )


def _unknown(function: str, sender: int, remedy: str) -> RuntimeError:
    return RuntimeError(
        f"{function} returns what rank {sender} of the group sends, but in a dry run this process is alone. {remedy}"
    )


OBJECT_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_gather_object": _all_gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "gather_object": _gather_object,
    "recv_object_list": _recv_object_list,
    "scatter_object_list": _scatter_object_list,
    "send_object_list": _send_object_list,
}
