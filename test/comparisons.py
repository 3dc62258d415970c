"""Comparisons of results: their metadata, the errors of calls, and copies of arguments with other strides."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

__all__ = [
    "ALL_PROPERTIES",
    "LOOSE_PROPERTIES",
    "PROPERTIES",
    "Raised",
    "channels_last",
    "copy_with_same_strides",
    "error_of",
    "metadata",
    "outcome",
    "reversed_strides",
    "strides_that_matter",
    "with_gaps",
]

Value = TypeVar("Value")


def strides_that_matter(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that determine where elements are: those of long dimensions, unless there are no elements."""
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple(stride for stride, size in strides if size > 1) if tensor.numel() else ()


_OF_ANY_LAYOUT: dict[str, Callable[[Tensor], object]] = {
    "class": type,
    "layout": lambda tensor: tensor.layout,
    "shape": lambda tensor: tensor.shape,
    "dtype": lambda tensor: tensor.dtype,
    "device": lambda tensor: tensor.device,
    "requires_grad": lambda tensor: tensor.requires_grad,
    "is_conj": Tensor.is_conj,
    "is_neg": Tensor.is_neg,
    "is_leaf": lambda tensor: tensor.is_leaf,
    "is_view": Tensor._is_view,
    "has_base": lambda tensor: tensor._base is not None,
    "is_inference": Tensor.is_inference,
    "version": lambda tensor: None if tensor.is_inference() else tensor._version,
    "grad_fn": lambda tensor: type(tensor.grad_fn),
}
_OF_STRIDED: dict[str, Callable[[Tensor], object]] = {
    "strides": Tensor.stride,
    "strides_that_matter": strides_that_matter,
    "is_contiguous": Tensor.is_contiguous,
    "storage_offset": Tensor.storage_offset,
    "storage_size": lambda tensor: tensor.untyped_storage().nbytes(),
}
# "value" is that of a leaf that is not a tensor, such as a number.
ALL_PROPERTIES = frozenset({*_OF_ANY_LAYOUT, *_OF_STRIDED, "value"})
PROPERTIES = frozenset(
    {"class", "layout", "shape", "dtype", "device", "requires_grad", "is_conj", "is_neg", "strides", "value"}
)
# Kernels may choose the other strides.
LOOSE_PROPERTIES = PROPERTIES - {"strides"} | {"strides_that_matter"}


def metadata(values: object, properties: Set[str] = PROPERTIES) -> Any:
    """Return the named properties of a tensor, or of each leaf of a tree: everything except the values of tensors.

    Args:
        values: A tensor, or a tree. Trees are equal if their containers are also equal.
        properties: Names from `ALL_PROPERTIES`. Properties of storages and strides apply to strided tensors only. Other
            leaves than tensors have a class, regardless of `properties`, and a value.
    """
    unknown = properties - ALL_PROPERTIES
    if unknown:
        raise ValueError(f"expected names from ALL_PROPERTIES, got {sorted(unknown)}")

    def of(leaf: object) -> dict[str, object]:
        if not isinstance(leaf, Tensor):
            return {"class": type(leaf)} | ({"value": leaf} if "value" in properties else {})
        table = _OF_ANY_LAYOUT | (_OF_STRIDED if leaf.layout is torch.strided else {})
        return {name: get(leaf) for name, get in table.items() if name in properties}

    return of(values) if isinstance(values, Tensor) else tree_map(of, values)  # the first is faster


class Raised(NamedTuple):
    """The class of an error and the first line of its message."""

    error: type[Exception]
    line: str

    @classmethod
    def of(cls, error: Exception) -> Raised:
        """Drop the traceback, whose frames hold tensors."""
        return cls(type(error), next(iter(str(error).splitlines()), ""))


def outcome(run: Callable[[], Value]) -> Value | Raised:
    """Return the result of a call, or its error in a form that can be compared."""
    try:
        return run()
    except Exception as error:
        return Raised.of(error)


def error_of(run: Callable[[], object], expected: type[Exception] | tuple[type[Exception], ...] = Exception) -> Raised:
    """Return the error of a call that must raise one of the expected classes."""
    try:
        run()
    except expected as error:
        return Raised.of(error)
    raise AssertionError("expected an error")


def copy_with_same_strides(tensor: Tensor) -> Tensor:
    """Return a copy with the strides of the tensor, which `clone()` keeps only if they leave no gaps."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def reversed_strides(tensor: Tensor) -> Tensor:
    """Return a copy with its dimensions in reverse order in memory."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).clone(memory_format=torch.contiguous_format).permute(order)


def with_gaps(tensor: Tensor) -> Tensor:
    """Return a copy with unused memory between its elements."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def channels_last(tensor: Tensor) -> Tensor:
    """Return the same values with channels last in memory, or the tensor itself if it is not an image or a volume."""
    if tensor.dim() not in (4, 5):
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d)
