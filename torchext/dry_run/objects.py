"""Collectives of Python objects without the other ranks: every rank is assumed to send the objects of this one.

A real object collective pickles objects into tensors, on the device of the group. Here they are pickled as well, so
that objects that cannot be pickled fail, and results are copies.

Some objects exist only on another rank: messages, parts of a list that only the root has, and broadcasts into `None`.
These are received from that rank if it runs in its own process (`messages.py`), and raise an error otherwise.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..internals.dispatch_keys import with_our_keys
from ..internals.patching import Function
from .current import current, while_world_is_open
from .messages import Messages
from .placeholders import load_placeholder, save_placeholder

__all__ = ["assigned", "others_sending", "root_sending"]

replaces: Callable[..., Callable[[Function], Function]] = partial(
    while_world_is_open.replaces, distributed_c10d, reason="reads pickled objects of other ranks from tensors"
)

Sent = TypeVar("Sent")

_sent_by_root: ContextVar[list[Any] | None] = ContextVar("_sent_by_root", default=None)
_sent_by_others: ContextVar[Callable[[int], Any] | None] = ContextVar("_sent_by_others", default=None)


def root_sending(objects: list[Any]) -> AbstractContextManager[None]:
    """Receive `objects` from broadcasts in the block, in place of the objects of their root."""
    return assigned(_sent_by_root, objects)


def others_sending(make: Callable[[int], Any]) -> AbstractContextManager[None]:
    """Receive `make(rank)` from each other rank of a group that gathers in the block."""
    return assigned(_sent_by_others, make)


@contextmanager
def assigned(variable: ContextVar[Sent], value: Sent) -> Iterator[None]:
    """Give `variable` a value in the block, on this thread."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def _copies(value: object, count: int) -> list[Any]:
    """Return `count` copies of `value`, as received from that many ranks."""
    stream = io.BytesIO()
    with with_our_keys():
        distributed_c10d._pickler(stream).dump(value)
        data = stream.getvalue()
        return [pickle.loads(data) for _ in range(count)]


def _messages() -> Messages | None:
    world = current()
    return None if world is None else world.messages


def _encoded(objects: list[Any]) -> bytes:
    """Pickle objects that may contain fakes."""
    stream = io.BytesIO()
    with with_our_keys():
        save_placeholder(objects, stream)
    return stream.getvalue()


def _decoded(data: bytes) -> list[Any]:
    with with_our_keys():
        objects: list[Any] = load_placeholder(io.BytesIO(data))
    return objects


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found: dist.ProcessGroup = group or distributed_c10d._get_default_group()
    return found


def _is_outside(group: dist.ProcessGroup | None) -> bool:
    return distributed_c10d._rank_not_in_group(group)


def _peer(global_rank: int | None, group_rank: int | None, group: dist.ProcessGroup | None) -> int:
    """Return the rank in the group, checked as PyTorch does."""
    in_group = group or distributed_c10d._get_default_group()
    return int(distributed_c10d._canonicalize_group_rank(in_group, global_rank, group_rank))


@replaces("all_gather_object")
def _all_gather_object(
    original: Function, object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None
) -> None:
    if not _is_outside(group):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        make = _sent_by_others.get()
        received = _copies(obj, size) if make is None else [obj if i == rank else make(i) for i in range(size)]
        for i, one in enumerate(received):
            object_list[i] = one


@replaces("gather_object")
def _gather_object(
    original: Function,
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


@replaces("broadcast_object_list")
def _broadcast_object_list(
    original: Function,
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
    root = _peer(src, group_src, group)
    if not object_list:
        raise IndexError("list index out of range")  # as the original does
    if (sent := _sent_by_root.get()) is not None:
        if (messages := _messages()) is not None:
            messages.skip_objects(_group(group), root)
        object_list[:] = sent
        return
    received = _broadcast_from(root, object_list, group)
    if received is not None:
        object_list[:] = received
        return
    object_list[:] = [copy for value in object_list for copy in _copies(value, 1)]


def _broadcast_from(root: int, own: list[Any], group: dist.ProcessGroup | None) -> list[Any] | None:
    """Return the objects of the root if its process runs and this rank's list contains `None`, otherwise None."""
    messages = _messages()
    if messages is None:
        return None
    if root == dist.get_rank(group):
        messages.send_objects(_group(group), _encoded(own))
    elif any(value is None for value in own):
        data = messages.receive_objects(_group(group), root, is_to_all=True)
        return None if isinstance(data, str) else _decoded(data)
    else:
        messages.skip_objects(_group(group), root)
    return None


@replaces("scatter_object_list")
def _scatter_object_list(
    original: Function,
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
    messages = _messages()
    if given is None or len(given) != dist.get_world_size(group):
        if rank == root:
            raise ValueError("source rank must provide non-None scatter_object_input_list")
        remedy = "Pass the list on all ranks: in a job all but the source ignore it."
        given = _received("scatter_object_list()", root, group, remedy, is_to_all=True)
    elif messages is not None and rank == root:
        messages.send_objects(_group(group), _encoded(given))
    elif messages is not None:
        messages.skip_objects(_group(group), root)
    scatter_object_output_list[0] = _copies(given[rank], 1)[0]


@replaces("send_object_list")
def _send_object_list(
    original: Function,
    object_list: list[Any],
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    if _is_outside(group):
        return
    receiver = _peer(dst, group_dst, group)
    messages = _messages()
    if messages is None:
        _copies(object_list, 1)
    else:
        messages.send_objects(_group(group), _encoded(object_list), receiver)


@replaces("recv_object_list")
def _recv_object_list(
    original: Function,
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
    remedy = (
        "A PipelineStage with `input_args` and `output_args`, fake tensors or tensors on the device `meta`, receives "
        "no objects."
    )
    object_list[:] = _received("recv_object_list()", sender, group, remedy)
    return dist.get_global_rank(_group(group), sender)


def _received(
    function: str, sender: int, group: dist.ProcessGroup | None, remedy: str, *, is_to_all: bool = False
) -> list[Any]:
    """Return the objects that a rank of the group sends.

    Raises:
        RuntimeError: The rank does not run, or does not send them.
    """
    messages = _messages()
    if messages is None:
        raise RuntimeError(
            f"{function} returns objects of rank {sender} of the group, which does not run. Use the command line "
            f"without --alone to run that rank as well. {remedy}"
        )
    data = messages.receive_objects(_group(group), sender, is_to_all=is_to_all)
    if isinstance(data, str):
        raise RuntimeError(f"{function} returns objects of rank {sender} of the group. {data} {remedy}")
    return _decoded(data)
