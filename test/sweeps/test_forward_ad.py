"""Forward AD of every operator of `op_db`: on fakes, and deferred with infinities, NaNs and signed zeros.

No argument requires a gradient, and some have no tangent: PyTorch's kernels take shortcuts there.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from common import assert_same_tensor
from sweeps.test_op_db import full_name
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from torchext.deferred_init import deferred_init, materialize_tensor
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake

Function = Callable[..., tuple[Tensor, ...]]
Transform = Callable[[Function, Sequence[Tensor], Sequence[Tensor]], Any]

OPERATORS = [op for op in op_db if op.supports_forward_ad]


class Call(NamedTuple):
    """A call of an operator, as a function of its differentiable arguments."""

    function: Function
    primals: list[Tensor]


def is_differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def call_of(op: OpInfo, sample: SampleInput, are_others_fake: bool) -> Call:
    leaves, spec = tree_flatten((sample.input, tuple(sample.args), sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if is_differentiable(leaf)]
    primals = [leaves[place].detach() for place in places]
    if are_others_fake:
        leaves = tree_map_only(Tensor, fake_like, leaves)

    def function(*differentiable: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for place, value in zip(places, differentiable, strict=True):
            given[place] = value
        first, args, kwargs = tree_unflatten(given, spec)
        return tuple(leaf for leaf in tree_leaves(op(first, *args, **kwargs)) if is_differentiable(leaf))

    return Call(function, primals)


def samples(op: OpInfo, count: int) -> Iterator[SampleInput]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every = list(op.sample_inputs("cpu", torch.float32))
    return itertools.islice(every, 0, None, max(1, len(every) // count))


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
SWEEPS = [
    pytest.param(transforms, count, id=name, marks=marks)
    for name, transforms, count, marks in (("usual", USUAL, 1, ()), ("long", LONG, 4, pytest.mark.long))
]


def run(transform: Transform, function: Function, primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tree_leaves(transform(function, primals, tangents))


def metadata(value: Tensor | None) -> object:
    if value is None or value.layout != torch.strided:
        return None if value is None else (value.shape, value.layout)
    strides = value.stride() if value.numel() else ()
    return value.shape, value.dtype, strides, value.requires_grad, value.is_conj(), value._is_view()


def with_special_values(tensor: Tensor) -> Tensor:
    """Return a copy that begins with infinity, a negative zero and NaN."""
    special = torch.tensor([float("inf"), -0.0, float("nan")], dtype=tensor.dtype)
    copy = tensor.clone(memory_format=torch.contiguous_format)
    copy.view(-1)[:3] = special[: copy.numel()]
    return copy


@pytest.mark.parametrize(("transforms", "count"), SWEEPS)
@pytest.mark.parametrize("op", OPERATORS, ids=full_name)
def test_tangents_of_fakes_have_the_metadata_of_real_ones(op: OpInfo, transforms: Any, count: int) -> None:
    for sample, transform in itertools.product(samples(op, count), transforms):
        real, fake = (call_of(op, sample, are_others_fake) for are_others_fake in (False, True))
        tangents = [torch.randn_like(primal) for primal in real.primals]
        try:
            wanted = run(transform, real.function, real.primals, tangents)
        except Exception:  # PyTorch has no such derivative
            continue
        try:
            with fake_mode():
                found = run(transform, fake.function, fake_like(real.primals), fake_like(tangents))
        except DataDependentError:
            continue
        assert [metadata(one) for one in found] == [metadata(one) for one in wanted], transform


@pytest.mark.parametrize(("transforms", "count"), SWEEPS)
@pytest.mark.parametrize("op", OPERATORS, ids=full_name)
def test_deferred_tangents_have_the_bits_of_eager_ones(op: OpInfo, transforms: Any, count: int) -> None:
    for sample, transform in itertools.product(samples(op, count), transforms):
        call = call_of(op, sample, are_others_fake=False)
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
                assert metadata(found) == metadata(expected)
                continue
            assert_same_tensor(materialize_tensor(found) if is_fake(found) else found, expected, transform.__name__)
            assert found._is_zerotensor() == expected._is_zerotensor()
