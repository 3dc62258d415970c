"""Process groups without the other ranks, under the backend names that a program uses.

They use PyTorch's backend `fake` (`FakeProcessGroup.hpp`), on the devices that the named backend serves, so PyTorch
itself rejects other devices. Rendezvous, barriers and the store do not wait for other ranks. The recorder observes each
collective, and writes the values that this rank receives.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Backend, BackendConfig, GroupMember

from .. import _C
from ..internals.dispatch_keys import without_our_keys
from ..internals.held_tensors import tensors_in
from ..internals.patching import Function
from .current import Job, current, while_rank_is_alone

__all__ = ["NCCL_TIMEOUT", "NCCL_VERSION", "SingleRankStore", "check", "communicating", "names_of_nccl"]


# ---- Names that a PyTorch without NCCL lacks, and that programs and PyTorch itself use
#
# `torch.distributed.ProcessGroupNCCL` exists in builds of PyTorch with NCCL. Programs construct its options, and
# PyTorch checks whether a backend is an instance if `is_nccl_available()`, which is true in a world with GPUs. Groups
# of a world are not instances.


# `ncclGetVersion()` of the NCCL in PyTorch's wheels. Programs check it for bfloat16 support.
NCCL_VERSION = (2, 27, 5)

NCCL_TIMEOUT = timedelta(minutes=10)  # `kProcessGroupNCCLDefaultTimeout`


class ProcessGroupNCCL:
    """A stand-in for the class. A world has no instances."""

    class Options:
        """Options of a group, which a world ignores.

        Attributes:
            is_high_priority_stream: Whether NCCL kernels run on a high-priority stream.
            config: The fields of `ncclConfig_t`, such as `cga_cluster_size`.
            _timeout: The timeout of collectives.
        """

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config: SimpleNamespace = SimpleNamespace()
            self._timeout = NCCL_TIMEOUT

        @property
        def backend(self) -> str:
            """The backend of the options."""
            return "nccl"


@contextmanager
def names_of_nccl() -> Iterator[None]:
    """Define the missing names in PyTorch's modules in the block."""
    modules = [module for module in (dist, distributed_c10d) if not hasattr(module, "ProcessGroupNCCL")]
    for module in modules:
        vars(module)["ProcessGroupNCCL"] = ProcessGroupNCCL
    try:
        yield
    finally:
        for module in modules:
            del vars(module)["ProcessGroupNCCL"]


# ---- The default group, and PyTorch's backend `fake`


@contextmanager
def communicating(world: Job, backend: str | None) -> Iterator[None]:
    """Observe the collectives of the open world in the block. Initialize its default group, if `backend` names one."""
    with _separate_meshes(), ExitStack() as block:
        block.callback(_destroy_groups)
        block.callback(world.recorder.close)
        _C.observe_collectives(world.recorder.observe)
        block.callback(_C.observe_collectives, None)
        if backend is not None:
            dist.init_process_group(backend)
            world.has_own_group = True
        yield


def _destroy_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _register_backend() -> None:
    """Import the module that registers PyTorch's backend `fake`."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


while_rank_is_alone.declare(_register_backend)

replaces: Callable[..., Callable[[Function], Function]] = partial(while_rank_is_alone.replaces, distributed_c10d)


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
while_rank_is_alone.replaces(torch.cuda.nccl, "version", reason="calls NCCL, which may be missing")(
    partial(_answer_with_gpus, NCCL_VERSION)
)


# ---- Construction


@replaces("_new_process_group_helper", reason="constructs backends that communicate")
def _new_process_group_helper(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs)
    backend = given.arguments["backend"]
    is_real = (world := current()) is not None and world.is_real
    served = ["cpu"] if is_real else BackendConfig(Backend(backend)).get_device_backend_map()
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
        if world.is_real:
            return
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


# ---- PyTorch's caches for device meshes, which outlive a world


@contextmanager
def _separate_meshes() -> Iterator[None]:
    """Separate the caches in the block from those before and after it."""
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    tracker = getattr(random, "_rng_tracker", None)
    _clear(None)
    try:
        yield
    finally:
        _clear(tracker)


def _clear(tracker: Any) -> None:
    """Set the tracker of the generators of a mesh's devices, and clear the caches of DTensor's sharding propagation.

    Their results are on a mesh that equals that of the call, but may belong to another world, whose groups are gone.
    """
    random: Any = sys.modules.get("torch.distributed.tensor._random")
    if random is not None:
        random._rng_tracker = tracker
    tensor: Any = sys.modules.get("torch.distributed.tensor._api")
    if tensor is None:
        return
    propagate = tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    clear = getattr(propagate, "cache_clear", None) or getattr(getattr(propagate, "cache", None), "cache_clear", None)
    if clear is not None:
        clear()
    if hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache"):
        torch._C._clear_DTensor_sharding_propagator_cache()


# ---- The store of a job that runs only one rank


class SingleRankStore(Store):
    """Keeps the values that this rank sets, and raises an error for missing keys instead of waiting for other ranks.

    PyTorch's C++ calls the methods through its trampoline `PythonStore`, which fixes their names.
    """

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self._rank = f"rank {rank} of {size}"
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._values[key] = _to_bytes(value)

    def get(self, key: str) -> bytes:
        """Return the value of a key.

        Raises:
            RuntimeError: This rank has not set the key, so a real rank would wait for another one.
        """
        self.wait([key])
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which is stored in decimal digits as by `Store.add()`."""
        total = int(self._values.get(key, b"0")) + value
        self._values[key] = str(total).encode()
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `desired` if the value is `expected`; a missing key has an empty value. Return the value."""
        expected, desired = _to_bytes(expected), _to_bytes(desired)
        if self._values.get(key, b"") == expected:
            self._values[key] = desired
        return self._values.get(key, expected)

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value of a key."""
        self._values[key] = self._values.get(key, b"") + _to_bytes(value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return true if all keys are set."""
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return if all keys are set.

        Raises:
            RuntimeError: A key is missing, and no other rank runs that could set it.
        """
        for key in keys:
            if key not in self._values:
                raise RuntimeError(
                    f"The program waits for the key {key!r} of the store, which another rank would set. In this dry "
                    f"run {self._rank} runs alone, and has not set it. Set it on this rank, or skip the exchange in a "
                    "dry run."
                )

    def delete_key(self, key: str) -> bool:
        """Delete a key. Return true if it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    # The names in some releases of the trampoline.
    getNumKeys: Callable[[SingleRankStore], int] = num_keys  # noqa: N815
    deleteKey: Callable[[SingleRankStore, str], bool] = delete_key  # noqa: N815

    def has_extended_api(self) -> bool:
        """Return true: `append`, `multi_get` and `multi_set` are implemented."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the store never waits."""


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# ---- Check the arguments of collectives as a real backend does: PyTorch's backend `fake` checks only some sizes
#
# The messages are those of the same checks in `ProcessGroupNCCL.cpp` and `Utils.hpp`.


def check(operator: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Raise an error if a real backend would.

    Args:
        operator: The name of an operator of `c10d`, without the namespace.
        arguments: The arguments of the call, by their names in the schema.
        group: The process group.

    Raises:
        RuntimeError: Sizes, dtypes or devices do not fit.
        ValueError: The group has no such rank.
    """
    _check_ranks(operator, arguments, group)
    specific = CHECKS.get(operator)
    if specific is not None:
        specific(arguments, group.size())


def _refuse(is_wrong: bool, message: str) -> None:
    if is_wrong:
        raise RuntimeError(message)


def _check_ranks(operator: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> None:
    for name in ("root_rank", "src", "dst"):
        rank = arguments.get(name)
        if rank is not None and not 0 <= rank < group.size():
            raise ValueError(f"c10d::{operator}: invalid {name} {rank}: the group has {group.size()} ranks")
    # With NCCL a rank may send to itself in a batch, as V-shaped pipeline schedules do before PyTorch 2.12.
    is_of_nccl = all(tensor.is_cuda for tensor in tensors_in(arguments.get("tensors")))
    if arguments.get("src", arguments.get("dst")) == group.rank() and not is_of_nccl:
        raise ValueError(f"c10d::{operator}: rank {group.rank()} of the group would exchange a tensor with itself")


def _check_alike(tensors: Sequence[Tensor]) -> None:
    """Check what `check_gpu_tensors_same_device()` checks."""
    first = tensors[0]
    for tensor in tensors[1:]:
        _refuse(tensor.dtype != first.dtype, "Tensors must have identical type")
        _refuse(tensor.device != first.device, "Expected list of tensors on the same device")


def _check_one_list(name: str) -> Callable[[dict[str, Any], int], None]:
    def check_list(arguments: dict[str, Any], size: int) -> None:
        tensors = list(tensors_in(arguments[name]))
        _refuse(not tensors, "Tensor list must be nonempty")
        _check_alike(tensors)

    return check_list


def _check_base(whole: str, part: str, message: str, type_message: str) -> Callable[[dict[str, Any], int], None]:
    def check_sizes(arguments: dict[str, Any], size: int) -> None:
        for one, other in zip(tensors_in(arguments[whole]), tensors_in(arguments[part]), strict=False):
            _refuse(one.dtype != other.dtype, type_message)
            _refuse(one.device != other.device, "Expected list of tensors on the same device")
            _refuse(one.numel() != other.numel() * size, message)

    return check_sizes


def _check_lists(lists: str, own: str, message: str) -> Callable[[dict[str, Any], int], None]:
    def check_lists(arguments: dict[str, Any], size: int) -> None:
        singles = list(tensors_in(arguments[own]))
        for one_list in arguments[lists]:
            tensors = list(tensors_in(one_list))
            _refuse(len(tensors) != size, message)
            _check_alike([*tensors, *singles])
            _refuse(
                sum(t.numel() for t in tensors) != size * singles[0].numel() and _are_equal(tensors),
                "All tensor operands to scatter/gather must have the same number of elements",
            )

    return check_lists


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1


def _check_all_to_all(arguments: dict[str, Any], size: int) -> None:
    outputs, inputs = arguments["output_tensors"], arguments["input_tensors"]
    _refuse(len(outputs) != size or len(inputs) != size, "tensor list size must match number of ranks")
    _check_alike([*outputs, *inputs])


def _check_split_sizes(arguments: dict[str, Any], size: int) -> None:
    _refuse(arguments["output"].dtype != arguments["input"].dtype, "Tensors must have identical type")
    _refuse(arguments["output"].device != arguments["input"].device, "Tensors must be on the same device")
    for name, sizes in (("output", "output_split_sizes"), ("input", "input_split_sizes")):
        tensor, split = arguments[name], arguments[sizes]
        if not split:
            _refuse(tensor.size(0) % size != 0, "Tensor's dim 0 does not divide equally across group size")
        else:
            _refuse(len(split) != size, "Number of tensor splits not equal to group size")
            _refuse(sum(split) != tensor.size(0), "Split sizes doesn't match total dim 0 size")


_GATHER_SIZES = "output tensor size must be equal to world_size times input tensor size"
_GATHER_TYPES = "output tensor must have the same type as input tensor"
_SCATTER_SIZES = "input tensor must be the same size as output size times world size"
_SCATTER_TYPES = "input tensor must be the same type as the output tensor."
_LIST_SIZES = "Tensor list operands to scatter/gather must have the same length as the number of ranks"

CHECKS: dict[str, Callable[[dict[str, Any], int], None]] = {
    "_allgather_base_": _check_base("output_tensor", "input_tensor", _GATHER_SIZES, _GATHER_TYPES),
    "_reduce_scatter_base_": _check_base("input_tensor", "output_tensor", _SCATTER_SIZES, _SCATTER_TYPES),
    "allgather_": _check_lists("output_tensors", "input_tensors", _LIST_SIZES),
    "allgather_into_tensor_coalesced_": _check_base("outputs", "inputs", _GATHER_SIZES, _GATHER_TYPES),
    "allreduce_": _check_one_list("tensors"),
    "allreduce_coalesced_": _check_one_list("tensors"),
    "alltoall_": _check_all_to_all,
    "alltoall_base_": _check_split_sizes,
    "broadcast_": _check_one_list("tensors"),
    "gather_": _check_lists("output_tensors", "input_tensors", _LIST_SIZES),
    "recv_": _check_one_list("tensors"),
    "reduce_": _check_one_list("tensors"),
    "reduce_scatter_": _check_lists("input_tensors", "output_tensors", _LIST_SIZES),
    "reduce_scatter_tensor_coalesced_": _check_base("inputs", "outputs", _SCATTER_SIZES, _SCATTER_TYPES),
    "scatter_": _check_lists("input_tensors", "output_tensors", _LIST_SIZES),
    "send": _check_one_list("tensors"),
}
