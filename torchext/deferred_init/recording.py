"""The block in which operators are recorded, and adaptations of PyTorch to recordings.

The adaptations are for functions that inductor has compiled, optimizers, and distributed checkpoints.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .. import _C
from ..errors import RanksDifferError, TorchextWarning
from ..fake.storage_patches import make_real
from ..internals.dispatch_keys import is_constructing, without_our_keys
from ..internals.held_tensors import Held, parts_of, reachable_tensors, shows_all
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

__all__ = ["Recording", "check_ranks", "companions", "have_recorded_the_same", "state_of"]


class Recording:
    """Records operators on the tensors that are constructed in the block, with their source lines if `trace` is set."""

    def __init__(self, *, trace: bool = False) -> None:
        self._trace = trace

    def __enter__(self) -> None:
        while_fakes_live.acquire()
        if self._trace:
            _C.enter_tracing()
        try:
            _C.enter_deferred_init()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            _C.leave_deferred_init()
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._trace:
            _C.leave_tracing()
        while_fakes_live.release()


# ---- Functions that inductor has compiled, in constructors
#
# Their kernels read memory without calling an operator. So their arguments are materialized, and their results are
# real.


@while_fakes_live.replaces(
    "torch._inductor.output_code:CompiledFxGraph", "__call__", reason="runs kernels that read memory"
)
def _call(original: Function, self: object, inputs: Any) -> Any:
    if not is_constructing():
        return original(self, inputs)
    make_real(inputs)
    with without_our_keys():
        return original(self, inputs)


# ---- Tensors that are materialized with a parameter: its gradient, and its state in optimizers


# Optimizers of deferred parameters, by `id()`, because they may define `__eq__`. They create state in their constructor
# (Adagrad), for `torch.distributed.checkpoint`, or in steps on deferred parameters. Without this the state would stay
# deferred, and every later step would be recorded, and replayed from the first one.
_optimizers: dict[int, ref[Optimizer]] = {}


@while_fakes_live.replaces(Optimizer, "__setstate__", reason="makes copies of optimizers, and loaded ones")
@while_fakes_live.replaces(
    Optimizer, "add_param_group", reason="receives the parameters whose state is materialized with them"
)
def _then_watch(original: Function, /, *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs)  # raises for missing arguments
    _watch(args[0] if args else kwargs["self"])


def _watch(optimizer: Optimizer) -> None:
    groups = getattr(optimizer, "param_groups", ())
    if any(_is_deferred(param) for group in groups for param in group.get("params", ())):
        key = id(optimizer)
        _optimizers[key] = ref(optimizer, lambda _: _optimizers.pop(key, None))


def companions(tensors: Iterable[torch.Tensor]) -> Iterator[Held]:
    """Yield the deferred tensors that must be materialized with `tensors`.

    All move with their tensor, except step counts, as with `Optimizer.load_state_dict()`.
    """
    optimizers = [optimizer for known in list(_optimizers.values()) if (optimizer := known()) is not None]
    for tensor in tensors:
        if _is_leaf(tensor) and tensor.grad is not None:
            yield from _deferred_in(tensor.grad, "grad", goes_along=True)
        for optimizer in optimizers:
            yield from _state_for(optimizer, tensor)


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # a view made under `no_grad()`, whose base was then written with gradients
        return False


def state_of(optimizer: Optimizer, materialized: Iterable[torch.Tensor]) -> Iterator[Held]:
    """Yield the deferred tensors in the state of `optimizer`, as `companions()` does.

    Args:
        optimizer: The optimizer.
        materialized: The tensors to materialize. State for other deferred parameters is left out.
    """
    known = set(map(id, materialized))
    for param in list(optimizer.state):
        if id(param) in known or not _is_deferred(param):
            yield from _state_for(optimizer, param)
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name != "params"}
        yield from _deferred_in(options, "option", goes_along=False)


def _state_for(optimizer: Optimizer, param: Any) -> Iterator[Held]:
    state = optimizer.state.get(param)
    if isinstance(state, dict):
        for name, value in state.items():
            yield from _deferred_in(value, name, goes_along=name != "step")


def _deferred_in(value: object, name: Any, goes_along: bool) -> Iterator[Held]:
    for tensor in reachable_tensors(value, _is_deferred):
        for part in filter(_C.is_deferred, parts_of(tensor)):
            yield Held(part, str(name), goes_along, False, part is not tensor, tensor)


def _is_deferred(param: object) -> bool:
    return isinstance(param, torch.Tensor) and any(map(_C.is_deferred, parts_of(param)))


# ---- `torch.distributed.checkpoint.save()` of deferred tensors: each is computed when it is written
#
# PyTorch's default planner returns the tensors one by one. Its file writer keeps all of them until the file is closed,
# although only safetensors files need this. So the planner computes the tensors, and written tensors are freed.


PLANNER = "torch.distributed.checkpoint.default_planner"

SLACK = 16 << 20
"""The freed memory that the process may keep, in bytes."""


class _Computed(threading.local):
    """The last tensor that a thread computed for writing."""

    storage: torch.UntypedStorage | None = None


_computed = _Computed()


@while_fakes_live.replaces(
    f"{PLANNER}:DefaultSavePlanner", "transform_object", reason="passes tensors to writers, which read them"
)
def _transform_object(original: Function, self: Any, write_item: Any, object: Any) -> Any:  # noqa: A002
    if isinstance(object, torch.Tensor) and _C.is_deferred(object):
        object = _C.evaluate(_own(object.detach()))  # noqa: A001
        if type(self).__module__ == PLANNER:  # other planners may keep their tensors
            _computed.storage = object.untyped_storage()
    return original(self, write_item, object)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its own storage and the same elements. The writer would clone a view."""
    return tensor if shows_all(tensor) else tensor.clone()


@while_fakes_live.replaces(
    "torch.distributed.checkpoint.filesystem", "_write_item", reason="keeps written tensors until the file ends"
)
def _write_item(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    data, serialization = _argument(args, kwargs, 2, "data"), _argument(args, kwargs, 5, "serialization_format")
    computed, _computed.storage = _computed.storage, None
    is_written = getattr(serialization, "name", "TORCH_SAVE") == "TORCH_SAVE"
    if is_written and computed is not None and isinstance(data, torch.Tensor):
        storage = data.untyped_storage()
        if storage._cdata == computed._cdata:
            storage.resize_(0)
            _C.RecycledMemory(SLACK).trim()
    return result


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)


# ---- Ranks with the same recording compute their parts of a tensor instead of sending it
#
# `distribute_tensor()` and `DistributedDataParallel` send parameters from one rank to the others. If all ranks have the
# same recording of the parameters, each can compute its own part. The ranks compare digests each time, so nothing
# depends on them running the same program. If the digests differ, PyTorch's collective is called, which materializes
# the tensors (NOTE [Collectives], csrc/extensions/collectives/collectives.h).


T = TypeVar("T")

logger: logging.Logger = logging.getLogger(__package__)

PATIENCE = timedelta(seconds=60)
"""The time that a rank waits for others, which may hold real tensors and never answer."""

SAME, DIFFERENT, ALONE = b"same", b"different", b"alone"

agrees_on: Callable[[dist.ProcessGroup, str], bool] | None = None
"""Compares a digest with ranks that do not run at the same time. `check_init` sets it in their processes."""

_counts: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
_mixed_groups: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def have_recorded_the_same(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> bool:
    """Return True if all ranks of `group` would materialize the same bits for `tensors`.

    All ranks call this, or only those with deferred tensors: a rank with real tensors is already in another collective,
    so a collective cannot reach it. The ranks meet in the store of the group instead. The last one to arrive decides,
    or the first one whose patience ends. All get the same answer.

    Args:
        tensors: All tensors, deferred or real.
        group: Ranks with lists of the same length.
    """
    if dist.get_backend(group) == "fake":  # the other ranks do not exist
        return True
    if agrees_on is not None:
        return agrees_on(group, _digest_of(tensors))
    if group in _mixed_groups:
        return False
    store = dist.distributed_c10d._world.pg_map[group][1]
    number = _counts[group] = _counts.get(group, 0) + 1
    answer = _meet(store, f"torchext/{number}", _digest_of(tensors), dist.get_world_size(group))
    if answer == ALONE:
        _mixed_groups[group] = True
        warnings.warn(
            f"A rank of the group `{group.group_name}` did not compare a deferred tensor with the other ranks within "
            f"{PATIENCE.seconds} seconds: it is late, or its tensor is real. From now on this group materializes the "
            "deferred tensors that it distributes as a whole, and sends them. To avoid this, construct them under "
            "deferred_init() in all ranks.",
            TorchextWarning,
            stacklevel=2,
        )
    if answer == DIFFERENT:
        logger.info("The ranks of `%s` have different recordings: sending the tensors.", group.group_name)
    return answer == SAME


def _meet(store: Store, key: str, digest: str, size: int) -> bytes:
    """Return the answer for `key`, which `size` ranks ask for.

    The last one to leave deletes the entries of the store, because a later group may use the same keys.
    """
    answer = _answer(store, key, digest, size)
    if store.add(f"{key}/left", 1) == size:
        for name in ("digest", "arrived", "answer", "left"):
            store.delete_key(f"{key}/{name}")
    return answer


def _answer(store: Store, key: str, digest: str, size: int) -> bytes:
    many = 1 << 32
    is_same = store.compare_set(f"{key}/digest", "", digest) == digest.encode()
    arrived = store.add(f"{key}/arrived", 1 if is_same else many)
    if arrived // many + arrived % many == size:
        return bytes(store.compare_set(f"{key}/answer", "", (SAME if arrived < many else DIFFERENT).decode()))
    try:
        store.wait([f"{key}/answer"], PATIENCE)
    except RuntimeError:  # a `DistStoreError` of some stores
        return bytes(store.compare_set(f"{key}/answer", "", ALONE.decode()))
    return bytes(store.get(f"{key}/answer"))


def _digest_of(tensors: Sequence[Tensor]) -> str:
    """Return a digest of the recordings. It distinguishes real tensors from deferred ones, not from each other."""
    which = [_is_recorded(tensor) for tensor in tensors]
    deferred = [tensor for tensor in tensors if _is_recorded(tensor)]
    return hashlib.sha256(repr((which, _C.digests_of_recordings(deferred))).encode()).hexdigest()


def check_ranks(held: Iterable[Held], group: dist.ProcessGroup | None) -> None:
    """Raise RanksDifferError, on all ranks of `group`, unless they have recorded the same sources of their tensors.

    Random fills, constants and real tensors are compared, but not the operators on them: each rank has another shard of
    the same tensors. A rank may have no element of a tensor that other ranks have: nothing is compared then.

    Args:
        held: The tensors to compare, by their names. Real tensors are left out.
        group: All of its ranks call this. None is the default group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("`check_ranks` compares ranks, but torch.distributed.init_process_group() was not called.")
    if dist.get_backend(group) == "fake":
        return
    tensors = _by_name(held)
    sources = zip(tensors.items(), _C.sources_of(list(tensors.values())), strict=True)
    own: Sources = {name: found if tensor.numel() else None for (name, tensor), found in sources}
    digests = _gather(hashlib.sha256(repr(own).encode()).digest(), group)
    if len(set(digests)) == 1:
        return
    expected: dict[str, tuple[int, list[Source] | None]] = {}  # the first rank with elements, and its sources
    for rank, found in enumerate(_gather(own, group)):
        difference = _first_difference(expected, found, rank) if rank > 0 else None
        if difference is not None:
            raise RanksDifferError(
                f"{difference} Nothing has been materialized. Call torch.manual_seed() with "
                "the same seed on all ranks before deferred_init(), and draw the same numbers on all of them. To "
                "compare only ranks that hold parts of the same model, pass `check_ranks=group`."
            )
        expected.update({name: (rank, one) for name, one in found.items() if expected.get(name, (0, None))[1] is None})


def _by_name(held: Iterable[Held]) -> dict[str, Tensor]:
    """Return the deferred tensors: parameters and buffers, then others whose storages are not among theirs."""
    tensors: dict[str, Tensor] = {}
    storages = set()
    for one in sorted(held, key=lambda one: not one.is_registered):
        if _is_recorded(one.tensor):
            storage = one.tensor.untyped_storage()._cdata
            if one.is_registered or storage not in storages:
                tensors.setdefault(one.name if one.is_registered else f"{one.name}, {len(tensors)}", one.tensor)
            storages.add(storage)
    return tensors


Source: TypeAlias = tuple[str, tuple[int, int]]
Sources: TypeAlias = dict[str, list[Source] | None]


def _gather(value: T, group: dist.ProcessGroup | None) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size(group)
    with without_our_keys():
        dist.all_gather_object(values, value, group)
    return values


def _first_difference(expected: dict[str, tuple[int, list[Source] | None]], found: Sources, rank: int) -> str | None:
    for name in [*expected, *found]:
        if name not in expected or name not in found:
            has, lacks = (0, rank) if name in expected else (rank, 0)
            return f"`{name}` is deferred in rank {has} of the group, and not in rank {lacks}."
        (first, wanted), other = expected[name], found[name]
        for one, another in zip_longest(wanted or (), other or (), fillvalue=("nothing", (0, 0))):
            if one != another and wanted is not None and other is not None:
                how = ", with other arguments or other random numbers" if one[0] == another[0] else ""
                return (
                    f"`{name}` comes from {one[0]} in rank {first} of the group, but from {another[0]} in rank {rank}"
                    f"{how}."
                )
    return None if list(expected) == list(found) else "The ranks hold the same tensors in another order."


# ---- Distribution of tensors: each rank computes its own part
#
# Without these patches, deferred tensors are materialized and sent.


COLLECTIVES = "torch.distributed.tensor._collective_utils"


@while_fakes_live.replaces(
    COLLECTIVES, "mesh_scatter", reason="sends parts of a tensor that all ranks may have recorded"
)
def _mesh_scatter(
    original: Function,
    /,
    output: Tensor,
    scatter_list: list[Tensor],
    mesh: Any,
    mesh_dim: int = 0,
    async_op: bool = False,
    **kwargs: Any,
) -> Any:
    is_asked = _is_recorded(output) and all(map(_is_recorded, scatter_list))
    if not (is_asked and have_recorded_the_same(scatter_list, mesh.get_group(mesh_dim))):
        return original(output, scatter_list, mesh, mesh_dim, async_op, **kwargs)
    with torch.no_grad():
        output.copy_(scatter_list[mesh.get_local_rank(mesh_dim)])
    return _finished(output) if async_op else None


@while_fakes_live.replaces(COLLECTIVES, "mesh_broadcast", reason="sends a tensor that all ranks may have recorded")
def _mesh_broadcast(
    original: Function, /, tensor: Tensor, mesh: Any, mesh_dim: int = 0, async_op: bool = False, **kwargs: Any
) -> Any:
    if not (_is_recorded(tensor) and have_recorded_the_same([tensor], mesh.get_group(mesh_dim))):
        return original(tensor, mesh, mesh_dim, async_op, **kwargs)
    return _finished(tensor) if async_op else None


@while_fakes_live.replaces(
    "torch.distributed.utils",
    "_sync_params_and_buffers",
    reason="sends parameters that all ranks may have recorded",
)
def _sync_params_and_buffers(
    original: Function,
    process_group: dist.ProcessGroup,
    module_states: list[Tensor],
    broadcast_bucket_size: int,
    src: int,
) -> None:
    is_asked = isinstance(module_states, Sequence) and any(map(_is_recorded, module_states))
    if is_asked and have_recorded_the_same(module_states, process_group):
        module_states = [state for state in module_states if not _is_recorded(state)]
    original(process_group, module_states, broadcast_bucket_size, src)


def _is_recorded(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and _C.is_deferred(tensor)


def _finished(tensor: Tensor) -> Any:
    """Return the `Work` of a completed collective."""
    distributed_c10d: Any = torch._C._distributed_c10d
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    with without_our_keys():
        future.set_result([tensor])
    return distributed_c10d._create_work_from_future(future)
