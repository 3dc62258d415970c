"""Forward AD on fakes, and deferred with infinities, NaNs and signed zeros.

No argument requires a gradient, and some have no tangent: PyTorch's kernels take shortcuts there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tiers
import torch
import torch.autograd.forward_ad as forward_ad
from common import assert_same_tensor
from comparisons import PROPERTIES, metadata
from sweeps.checks.fakes import NEEDS_VALUES, UNSUPPORTED
from sweeps.operators import Arguments, Visit, check, same_storage_copy, tensors_in
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_like, fake_mode, is_fake

COMPARED = PROPERTIES | {"is_view"}

Function = Callable[..., tuple[Tensor, ...]]
Transform = Callable[[Function, Sequence[Tensor], Sequence[Tensor]], Any]


class Call(NamedTuple):
    """A call of an operator, as a function of its differentiable arguments."""

    function: Function
    primals: list[Tensor]


def is_differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def call_of(visit: Visit, are_others_fake: bool = False) -> Call:
    leaves, spec = tree_flatten(visit.arguments(lambda tensor: same_storage_copy(tensor.detach())))
    places = [place for place, leaf in enumerate(leaves) if is_differentiable(leaf)]
    primals = [leaves[place] for place in places]
    if are_others_fake:
        leaves = tree_map_only(Tensor, fake_like, leaves)

    def function(*differentiable: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for place, value in zip(places, differentiable, strict=True):
            given[place] = value
        args, kwargs = tree_unflatten(given, spec)
        return tuple(leaf for leaf in tree_leaves(visit.op(*args, **kwargs)) if is_differentiable(leaf))

    return Call(function, primals)


def duals(function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor | None]:
    with forward_ad.dual_level():
        results = function(*map(forward_ad.make_dual, primals, tangents))
        return [part for result in results for part in forward_ad.unpack_dual(result)]


def duals_of_some(function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor | None]:
    """Make duals: only the first argument has a tangent. PyTorch makes zeros without memory for required others."""
    return duals(lambda first: function(first, *primals[1:]), primals[:1], tangents[:1])


def jvp(function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    return torch.func.jvp(function, tuple(primals), tuple(tangents))


def jvp_of_jvp(function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    return jvp(lambda *inner: jvp(function, inner, tangents), primals, tangents)


def vmap_of_jvp(function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    batches = tuple(tuple(torch.stack([one, one]) for one in many) for many in (primals, tangents))
    return torch.vmap(lambda *batch: jvp(function, *batch), randomness="same")(*batches)


def jvp_of_vmap(function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    batches = tuple(tuple(torch.stack([one, one]) for one in many) for many in (primals, tangents))
    return jvp(torch.vmap(function, randomness="same"), *batches)


def jvp_of_gradient(function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
    def loss(*given: Tensor) -> Tensor:
        return sum((result.sum() for result in function(*given)), torch.zeros(()))

    return jvp(torch.func.grad(loss, argnums=tuple(range(len(primals)))), primals, tangents)


USUAL: tuple[Transform, ...] = (duals, duals_of_some, jvp_of_jvp, vmap_of_jvp)
LONG: tuple[Transform, ...] = (*USUAL, jvp, jvp_of_vmap, jvp_of_gradient)


def transforms(visit: Visit) -> Sequence[Transform]:
    return LONG if tiers.is_long() else tiers.amount(tiers.chosen(USUAL, 2, visit.name), USUAL)


def run(transform: Transform, function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tree_leaves(transform(function, primals, tangents))


def with_special_values(tensor: Tensor) -> Tensor:
    """Return a copy that begins with infinity, a negative zero and NaN."""
    special = torch.tensor([float("inf"), -0.0, float("nan")], dtype=tensor.dtype)
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy.view(-1)[:3] = special[: copy.numel()]
    return copy


def supports_forward_ad(op: OpInfo) -> bool:
    return bool(op.supports_forward_ad)


@check(samples=(1, 1, 4), concerns=supports_forward_ad)
def tangents_of_fakes_have_the_metadata_of_real_ones(visit: Visit) -> None:
    for transform in transforms(visit):
        real, fake = call_of(visit), call_of(visit, are_others_fake=True)
        tangents = [torch.randn_like(primal) for primal in real.primals]
        try:
            wanted = run(transform, real.function, real.primals, tangents)
        except Exception:  # PyTorch has no such derivative
            continue
        try:
            with fake_mode():
                found = run(transform, fake.function, fake_like(real.primals), fake_like(tangents))
        except DataDependentError:
            assert visit.name in NEEDS_VALUES, transform.__name__
            continue
        assert metadata(found, COMPARED) == metadata(wanted, COMPARED), transform.__name__


@check(samples=(1, 1, 4), concerns=supports_forward_ad)
def deferred_tangents_have_the_bits_of_eager_ones(visit: Visit) -> None:
    for transform in transforms(visit):
        call = call_of(visit)
        primals = [with_special_values(primal) for primal in call.primals]
        tangents = [with_special_values(torch.randn_like(primal)) for primal in primals]

        def build(
            transform: Transform = transform, call: Call = call, primals: Any = primals, tangents: Any = tangents
        ) -> list[Any]:
            copies = [[torch.zeros_like(one).copy_(one) for one in many] for many in (primals, tangents)]
            return run(transform, call.function, *copies)

        try:
            wanted = build()
        except Exception:  # PyTorch has no such derivative
            continue
        for found, expected in zip(deferred_init(build), wanted, strict=True):
            if expected is None or expected.layout != torch.strided:
                assert metadata(found, COMPARED) == metadata(expected, COMPARED)
                continue
            assert_same_tensor(materialize_tensor(found) if is_fake(found) else found, expected, transform.__name__)
            assert found._is_zerotensor() == expected._is_zerotensor()


# ---- Arguments that require gradients.


@check(samples=(1, None, None), concerns=supports_forward_ad, release=(2, 13))
def tangents_of_arguments_with_gradients_have_the_metadata_of_real_ones(visit: Visit) -> None:
    if not visit.is_strided:
        return
    try:
        wanted = tangents_of_ones(visit, visit.arguments())
    except Exception:  # PyTorch has no such derivative
        return
    try:
        with fake_mode():
            found = tangents_of_ones(visit, visit.arguments(fake_like))
    except (DataDependentError, UnsupportedOperatorError):
        assert visit.name in NEEDS_VALUES | UNSUPPORTED
        return
    assert metadata(found, COMPARED) == metadata(wanted, COMPARED)


def tangents_of_ones(visit: Visit, arguments: Arguments) -> list[Tensor | None]:
    """Return the primals and tangents of the results, for tangents of ones of all arguments with gradients."""

    def dual(tensor: Tensor) -> Tensor:
        return forward_ad.make_dual(tensor, torch.ones_like(tensor)) if tensor.requires_grad else tensor

    with forward_ad.dual_level():
        results = tensors_in(arguments.map(dual).call(visit.op))
        return [part for result in results for part in forward_ad.unpack_dual(result)]
