"""Invalid calls: samples of `op_db` with one argument changed, and their outcomes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from comparisons import (
    LOOSE_PROPERTIES,
    Raised,
    channels_last,
    copy_with_same_strides,
    metadata,
    outcome,
    reversed_strides,
    with_gaps,
)
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_like, fake_mode

__all__ = ["Call", "Difference", "call_of", "compare", "enlarged", "error_calls_of", "layouts", "mutations"]

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.complex64)


class Call(NamedTuple):
    """A call of an operator: its arguments as leaves of a tree, and the change in them."""

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    change: str

    def run(self, convert: Callable[[Tensor], Tensor]) -> Any:
        converted: dict[int, Tensor] = {}

        def of(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in converted:
                converted[id(leaf)] = convert(leaf)
            return converted[id(leaf)]

        arguments, kwargs = tree_unflatten([of(leaf) for leaf in self.leaves], self.spec)
        return self.function(*arguments, **kwargs)

    def __str__(self) -> str:
        def show(leaf: Any) -> str:
            if not isinstance(leaf, Tensor):
                return repr(leaf)
            return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}{'@meta' if leaf.is_meta else ''}"

        return f"{self.change}: {', '.join(map(show, self.leaves))}"


class Difference(NamedTuple):
    """How a fake call differs from a real one."""

    kind: str
    call: str
    wanted: str
    found: str


def call_of(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], change: str = "unmodified") -> Call:
    leaves, spec = tree_flatten((args, kwargs))
    return Call(op, leaves, spec, change)


def is_plain(call: Call) -> bool:
    return all(
        leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested
        for leaf in call.leaves
        if isinstance(leaf, Tensor)
    )


def changes_of(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    for dtype in DTYPES:
        if dtype is not tensor.dtype:
            yield f"to {str(dtype)[6:]}", tensor.to(dtype)
    yield "one dimension more", tensor.unsqueeze(0)
    if tensor.dim():
        yield "longer in the first dimension", torch.cat([tensor, tensor[:1]]) if len(tensor) else tensor
        yield "emptied", tensor[:0]
        if tensor.numel():
            yield "without dimensions", tensor.flatten()[0]
    if tensor.dim() > 1:
        yield "longer in the last dimension", torch.cat([tensor, tensor[..., :1]], -1)
        yield "transposed", tensor.transpose(0, -1)
    yield "on the meta device", tensor.to("meta")


def layouts(call: Call) -> Iterator[Call]:
    """Return the same call with other strides: of all tensors, and of the first one only."""
    places = [place for place, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and not leaf.is_meta]
    for change in (reversed_strides, channels_last, with_gaps):
        for changed in (places, places[:1]) if len(places) > 1 else (places,):
            leaves = list(call.leaves)
            for place in changed:
                with torch.no_grad():
                    leaves[place] = change(leaves[place].detach())
            yield call._replace(leaves=leaves, change=f"{change.__name__} {changed}")


# Sizes, by the largest number of dimensions of an argument, that have more elements than a trial may have.
LARGE = {1: (32771, 40009), 2: (183, 211, 401, 97), 3: (33, 41, 37, 35), 4: (15, 17, 13, 19), 5: (9, 11, 7, 13)}
MOST_ELEMENTS = 100_000


def with_sizes(tensor: Tensor, sizes: dict[int, int]) -> Tensor:
    """Return `tensor` repeated or cut to other sizes, so that its values stay in their range."""
    for dim, size in enumerate(tensor.shape):
        if size and size in sizes:
            tensor = tensor.index_select(dim, torch.arange(sizes[size]) % size)
    return tensor


def enlarged(call: Call) -> Iterator[Call]:
    """Return the same call with all sizes replaced by larger ones, and with one: equal ones stay equal."""
    tensors = [leaf.detach() for leaf in call.leaves if isinstance(leaf, Tensor)]
    dims = max((tensor.dim() for tensor in tensors), default=0)
    if dims not in LARGE or not tensors[0].numel():
        return
    longest = sorted({size for tensor in tensors for size in tensor.shape if size > 1})
    changes = [{size: LARGE[dims][i % len(LARGE[dims])] + 100 * i // 4 for i, size in enumerate(longest)}]
    for size in {*tensors[0].shape[:1], *tensors[0].shape[-1:]} - {1}:
        changes.append({size: 33_001 * size // tensors[0].numel() + 2 | 1})
    for sizes in changes:
        count = sum(prod(sizes.get(size, size) for size in tensor.shape) for tensor in tensors)
        if 32_000 < count < MOST_ELEMENTS:
            leaves = [
                with_sizes(leaf.detach(), sizes)
                if isinstance(leaf, Tensor)
                else sizes.get(leaf, leaf)
                if type(leaf) is int and leaf > dims
                else leaf
                for leaf in call.leaves
            ]
            yield call._replace(leaves=leaves, change=f"sizes {sizes}")


def mutations(call: Call) -> Iterator[Call]:
    for position, leaf in enumerate(call.leaves):

        def with_leaf(change: str, value: Any, position: int = position) -> Call:
            leaves = list(call.leaves)
            leaves[position] = value
            return call._replace(leaves=leaves, change=f"{change} #{position}")

        if isinstance(leaf, Tensor) and not leaf.is_meta:
            with torch.no_grad():
                for change, changed in changes_of(leaf.detach()):
                    yield with_leaf(change, changed)
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            yield with_leaf("larger", leaf + 10)
            yield with_leaf("smaller", leaf - 10)


def depends_on_values(call: Call) -> bool:
    """Return true if the call succeeds when all values are 0, or 1."""
    fills = (torch.zeros_like, torch.ones_like)
    return not all(isinstance(outcome(partial(call.run, fill)), Raised) for fill in fills)


def as_seen(result: Any) -> Any:
    leaves, spec = tree_flatten(result)
    if any(isinstance(leaf, Tensor) and (leaf.layout is not torch.strided) for leaf in leaves):
        return None
    return metadata(leaves, LOOSE_PROPERTIES - {"value"}), spec


def run_fake(call: Call) -> Any:
    def run() -> Any:
        with fake_mode():
            return call.run(lambda tensor: tensor if tensor.is_meta else fake_like(tensor))

    return outcome(run)


def is_written(call: Call) -> bool:
    return getattr(call.function, "name", "").endswith("_")


def compare(call: Call) -> Difference | None:
    """Return how the fake call differs from the real one, or None if it does not."""
    random.seed(0)
    torch.manual_seed(0)
    real = outcome(lambda: call.run(copy_with_same_strides if is_written(call) else lambda tensor: tensor))
    fake = run_fake(call)

    def difference(kind: str) -> Difference:
        def show(one: Any) -> str:
            return f"{one.error.__name__}: {one.line}" if isinstance(one, Raised) else str(as_seen(one))

        return Difference(kind, str(call), show(real), show(fake))

    if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in call.leaves):
        # C++ and Python operators differ in whether they accept tensors on the meta device together with others, and in
        # their errors. Ours always raise.
        return difference("accepted") if isinstance(real, Raised) and not isinstance(fake, Raised) else None
    if not isinstance(real, Raised):
        if isinstance(fake, Raised):
            if fake.error in (DataDependentError, UnsupportedOperatorError):
                return None  # sweeps/checks/fakes.py covers this
            return difference("refused too much")
        wanted = as_seen(real)
        return None if wanted is None or wanted == as_seen(fake) else difference("another result")
    if not isinstance(fake, Raised):
        return None if depends_on_values(call) else difference("accepted")
    if fake.error is not real.error:
        return None if depends_on_values(call) else difference("another class")
    if fake.line != real.line:
        return None if depends_on_values(call) else difference("other words")
    return None


def error_calls_of(op: OpInfo) -> Iterator[Call]:
    """Return the calls that PyTorch's own tests expect to raise."""
    if op.error_inputs_func is not None:
        for error_input in op.error_inputs("cpu"):
            sample = error_input.sample_input
            call = call_of(op, (sample.input, *sample.args), sample.kwargs, "error input")
            if is_plain(call):
                yield call
