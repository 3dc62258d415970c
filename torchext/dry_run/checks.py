"""Check the arguments of collectives as a real backend does: PyTorch's backend `fake` checks only some sizes.

The messages are those of the same checks in `ProcessGroupNCCL.cpp` and `Utils.hpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor

__all__ = ["check"]


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


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of an argument: a tensor, a list, or a list of lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return list(chain.from_iterable(map(tensors_of, value)))
    return []


def _refuse(is_wrong: bool, message: str) -> None:
    if is_wrong:
        raise RuntimeError(message)


def _check_ranks(operator: str, arguments: dict[str, Any], group: dist.ProcessGroup) -> None:
    for name in ("root_rank", "src", "dst"):
        rank = arguments.get(name)
        if rank is not None and not 0 <= rank < group.size():
            raise ValueError(f"c10d::{operator}: invalid {name} {rank}: the group has {group.size()} ranks")
    # With NCCL a rank may send to itself in a batch, as V-shaped pipeline schedules do before PyTorch 2.12.
    is_of_nccl = all(tensor.is_cuda for tensor in tensors_of(arguments.get("tensors")))
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
        tensors = tensors_of(arguments[name])
        _refuse(not tensors, "Tensor list must be nonempty")
        _check_alike(tensors)

    return check_list


def _check_base(whole: str, part: str, message: str, type_message: str) -> Callable[[dict[str, Any], int], None]:
    def check_sizes(arguments: dict[str, Any], size: int) -> None:
        for one, other in zip(tensors_of(arguments[whole]), tensors_of(arguments[part]), strict=False):
            _refuse(one.dtype != other.dtype, type_message)
            _refuse(one.device != other.device, "Expected list of tensors on the same device")
            _refuse(one.numel() != other.numel() * size, message)

    return check_sizes


def _check_lists(lists: str, own: str, message: str) -> Callable[[dict[str, Any], int], None]:
    def check_lists(arguments: dict[str, Any], size: int) -> None:
        singles = tensors_of(arguments[own])
        for one_list in arguments[lists]:
            tensors = tensors_of(one_list)
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
