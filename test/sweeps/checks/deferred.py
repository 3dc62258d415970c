"""Operators that a constructor calls: materialized results and gradients equal eager ones, bit for bit.

The tables are the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiers
import torch
from comparisons import copy_with_same_strides
from sweeps.operators import UNINITIALIZED, Arguments, Visit, check
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor

__all__ = ["WAYS", "Function", "assert_same_values", "differentiable", "weighted"]

# The results of LAPACK's least squares depend on where the matrices are in memory.
NOT_REPRODUCIBLE = {"linalg.lstsq"}

# PyTorch saves the noise for the backward pass before the kernel writes it: hooks get uninitialized memory.
HOOKS_GET_UNINITIALIZED = {"nn.functional.rrelu"}

Function = Callable[..., Any]


def is_reproducible(op: OpInfo) -> bool:
    return op.name not in NOT_REPRODUCIBLE


# ---- Results.


@check(samples=(1, 3, 3), concerns=is_reproducible, release=(2, 13))
def constructor_that_calls_it_is_exact(visit: Visit) -> None:
    def run() -> list[Any]:
        return tree_leaves(visit.arguments(lambda tensor: leaf(tensor.detach())).call(visit.op))

    torch.manual_seed(0)
    try:
        wanted = run()
    except Exception:  # a sample that this build of PyTorch cannot run
        return
    generator_state = torch.get_rng_state()
    torch.manual_seed(0)
    found = deferred_init(run)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert_same_values(found, wanted, visit.op.name not in UNINITIALIZED, in_reverse=False)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, Tensor) and other.layout is torch.strided:
            assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())


# ---- Gradients.


def doubled(tensor: Tensor) -> Tensor:
    return tensor * 2 if tensor.dtype in (torch.float32, torch.float64) else tensor.clone()


def halved(tensor: Tensor) -> Tensor:
    return tensor / 2 if tensor.dtype in (torch.float32, torch.float64) else tensor


def with_hooks(fn: Function) -> Function:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(doubled, halved):
            return fn(*args, **kwargs)

    return run


def with_checkpoint(fn: Function) -> Function:
    return lambda *args, **kwargs: checkpoint(fn, *args, use_reentrant=False, **kwargs)


WAYS: dict[str, Callable[[Function], Function]] = {
    "plain": lambda fn: fn,
    "hooks": with_hooks,
    "checkpoint": with_checkpoint,
}


@check(samples=(1, 1, None), concerns=lambda op: op.supports_autograd and is_reproducible(op))
def gradients_equal_eager_ones(visit: Visit) -> None:
    compare(visit, visit.op.op, tuple(WAYS) if tiers.is_long() else ("hooks",))


@check(samples=(1, 1, None), concerns=lambda op: op.inplace_variant is not None and is_reproducible(op))
def gradients_of_overwritten_values_equal_eager_ones(visit: Visit) -> None:
    def write(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        written = first.clone()
        visit.op.inplace_variant(written, *args, **kwargs)
        return written

    compare(visit, write, tuple(WAYS) if tiers.is_long() else ("plain", "hooks"))


def compare(visit: Visit, fn: Function, names: tuple[str, ...]) -> None:
    for name in names:
        way = WAYS["plain" if visit.op.name in HOOKS_GET_UNINITIALIZED else name]
        torch.manual_seed(0)
        try:
            wanted = differentiate(way(fn), visit.arguments(leaf))
        except Exception:  # a sample that this build of PyTorch cannot run
            continue
        for in_reverse in (False, True) if tiers.is_long() else (True,):
            torch.manual_seed(0)
            found = differentiate(way(fn), deferred_init(visit.arguments, leaf))
            assert_same_values(found, wanted, visit.op.name not in UNINITIALIZED, in_reverse)


def leaf(value: Tensor) -> Tensor:
    """Return a copy of a tensor, which deferred_init records, as a leaf."""
    if value.layout is not torch.strided:
        return value
    return copy_with_same_strides(value.detach()).requires_grad_(value.requires_grad)


def differentiable(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and value.requires_grad]


def weighted(output: Tensor) -> Tensor:
    return torch.full_like(output, 0.5)


def differentiate(fn: Function, arguments: Arguments) -> list[Any]:
    """Return the results of `fn`, and the gradients of its arguments."""
    results = arguments.call(fn)
    outputs = differentiable(results)
    leaves = differentiable(arguments)
    found: list[Any] = list(tree_leaves(results))
    if outputs and leaves:
        found += torch.autograd.grad(outputs, leaves, [weighted(o) for o in outputs], allow_unused=True)
    return [*found, *leaves]


def assert_same_values(found: list[Any], wanted: list[Any], with_values: bool, in_reverse: bool) -> None:
    """Materialize all tensors in `found`, and assert that they equal those in `wanted`."""
    assert len(found) == len(wanted)
    for tensor in reversed(found) if in_reverse else found:
        if isinstance(tensor, Tensor) and is_deferred(tensor):
            materialize_tensor(tensor)
    for one, other in zip(found, wanted, strict=True):
        if not isinstance(other, Tensor):
            assert type(one) is type(other)
            assert one == other or (one != one and other != other)
            continue
        assert (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
        assert one.requires_grad == other.requires_grad
        if with_values:
            torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)
