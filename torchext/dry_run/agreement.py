"""The results of collectives of values, if every rank has the values of this one: NOTE [Assumed values].

Programs send small numbers so that ranks agree: whether a rank has found an infinity, how many tokens a batch has, how
many of them go to each expert. So a sum is the value times the size of the group, a maximum is the value itself, and
a gathered tensor repeats it, as collectives of objects do. The results are assumed values, not known ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _C
from ..internals.dispatch_keys import without_our_keys
from .checks import tensors_of

__all__ = ["agreed_values"]

Values = list[tuple[Tensor, Tensor]]


def agreed_values(operator: str, arguments: dict[str, Any], size: int, rank: int) -> Values:
    """Return the tensors that a collective writes and that get a value, each with its value.

    Args:
        operator: The operator of c10d.
        arguments: Its arguments before the call, by their names in the schema.
        size: The size of the group.
        rank: The rank of this process in the group.
    """
    rule = RULES.get(operator)
    if rule is None:
        return []
    with without_our_keys():
        try:
            return [
                (written, value.reshape(written.shape))
                for written, value in rule(arguments, size, rank)
                if value is not None and value.numel() == written.numel()
            ]
        except (IndexError, KeyError, RuntimeError):  # wrong arguments, which PyTorch rejects
            return []


def _value(tensor: Tensor) -> Tensor | None:
    value = _C.assumed_value(tensor)
    return None if value is None else value.clone()


def _reduced(value: Tensor | None, reduction: str, size: int) -> Tensor | None:
    if value is None or reduction in ("MIN", "MAX", "AVG", "BAND", "BOR") or value.dtype is torch.bool:
        return value
    if reduction == "SUM":
        return value * size
    if reduction == "PRODUCT":
        return value**size
    if reduction == "BXOR":
        return value * (size % 2)
    return None


def _in_place(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    reduction = arguments.get("reduce_op", "MAX")
    return [(t, _reduced(_value(t), reduction, size)) for t in tensors_of(arguments["tensors"])]


def _gathered(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    given = tensors_of(arguments["input_tensors"])
    lists = arguments["output_tensors"]
    return [(out, _value(t)) for outs, t in zip(lists, given, strict=False) for out in tensors_of(outs)]


def _gathered_flat(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    value = _value(arguments["input_tensor"])
    return [(arguments["output_tensor"], None if value is None else value.reshape(-1).repeat(size))]


def _each(
    rule: Callable[[dict[str, Any], int, int], list[tuple[Tensor, Tensor | None]]],
) -> Callable[[dict[str, Any], int, int], list[tuple[Tensor, Tensor | None]]]:
    """Return the rule for the coalesced form of an operator."""

    def of_all(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
        pairs = zip(tensors_of(arguments["outputs"]), tensors_of(arguments["inputs"]), strict=False)
        alone = [{**arguments, "output_tensor": out, "input_tensor": given} for out, given in pairs]
        return [pair for one in alone for pair in rule(one, size, rank)]

    return of_all


def _scattered(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    outs, lists = tensors_of(arguments["output_tensors"]), arguments["input_tensors"]
    reduction = arguments.get("reduce_op", "MAX")
    return [(out, _reduced(_value(given[rank]), reduction, size)) for out, given in zip(outs, lists, strict=False)]


def _scattered_flat(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    value = _value(arguments["input_tensor"])
    part = None if value is None else value.reshape(size, -1)[rank]
    return [(arguments["output_tensor"], _reduced(part, arguments["reduce_op"], size))]


def _exchanged(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    value = _value(tensors_of(arguments["input_tensors"])[rank])
    return [(out, value) for out in tensors_of(arguments["output_tensors"])]


def _exchanged_flat(arguments: dict[str, Any], size: int, rank: int) -> list[tuple[Tensor, Tensor | None]]:
    given, taken = arguments["input_split_sizes"], arguments["output_split_sizes"]
    value = _value(arguments["input"])
    if value is None:
        return []
    parts = value.split(given) if given else value.reshape(size, -1).split(1)
    mine = parts[rank].flatten()  # each rank sends this one what this one sends itself
    if taken and set(taken) != {parts[rank].shape[0]}:
        return []
    return [(arguments["output"], mine.repeat(size))]


RULES: dict[str, Callable[[dict[str, Any], int, int], list[tuple[Tensor, Tensor | None]]]] = {
    "allgather_into_tensor_coalesced_": _each(_gathered_flat),
    "reduce_scatter_tensor_coalesced_": _each(_scattered_flat),
    "allreduce_": _in_place,
    "allreduce_coalesced_": _in_place,
    "reduce_": _in_place,
    "broadcast_": _in_place,
    "allgather_": _gathered,
    "gather_": _gathered,
    "_allgather_base_": _gathered_flat,
    "reduce_scatter_": _scattered,
    "scatter_": _scattered,
    "_reduce_scatter_base_": _scattered_flat,
    "alltoall_": _exchanged,
    "alltoall_base_": _exchanged_flat,
}
