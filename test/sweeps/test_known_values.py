"""Known values of fakes equal those of the real run: every operator of `op_db`, also in place and with `out=`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from torchext import _C
from torchext.fake import fake_like, fake_mode, is_fake

SAMPLES = 5
DTYPES = (torch.float32, torch.int64)

Call = Callable[[Any], Any]


def calls_of(op: OpInfo, sample: SampleInput) -> Iterator[Call]:
    """Yield the variants of a call. They take the arguments of a sample."""
    yield lambda a: op.op(a[0], *a[1], **a[2])
    in_place = op.inplace_variant
    if in_place is not None:
        yield lambda a: in_place(a[0], *a[1], **a[2])
    if op.supports_out:
        yield lambda a: op.op(a[0], *a[1], **a[2], out=torch.empty(0, dtype=sample.input.dtype))


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def attempt(call: Call, arguments: Any) -> Any:
    """Return the result and the arguments, which the call may change; or the error."""
    try:
        return call(arguments), arguments
    except Exception as error:
        return error


def same(a: Tensor, b: Tensor) -> bool:
    return a.layout is torch.strided and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def copy_real(arguments: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, arguments)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
class TestKnownValues(TestCase):
    @ops(op_db, allowed_dtypes=DTYPES)
    def test_are_those_of_the_real_run(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        for sample in itertools.islice(op.sample_inputs(device, dtype), SAMPLES):
            for call in calls_of(op, sample):
                self.compare(call, copy_real((sample.input, sample.args, sample.kwargs)))

    def compare(self, call: Call, arguments: Any) -> None:
        """Run the call twice on real tensors: differing results are random or uninitialized."""
        fakes = fake_like(arguments)
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            wanted, again = attempt(call, copy_real(arguments)), attempt(call, copy_real(arguments))
            with fake_mode():
                found = attempt(call, fakes)
        if isinstance(wanted, Exception) or isinstance(found, Exception):
            return  # test_refusals.py and test_op_db.py compare errors
        triples = zip(tensors_in(wanted), tensors_in(again), tensors_in(found), strict=True)
        for real, repeated, fake in triples:
            known = _C.known_value(fake) if is_fake(fake) else None
            if known is not None and same(real, repeated):
                assert same(known, real), (known, real)


instantiate_device_type_tests(TestKnownValues, globals(), only_for="cpu")


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_have_the_values_of_the_real_run(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    steps: list[Callable[[list[Tensor]], object]] = []
    for _ in range(40):
        kind, i, j, number = pick(9), pick(4), pick(4), pick(5)
        steps.append(
            [
                lambda t, i=i, j=j: t[i].add_(t[j]),
                lambda t, i=i, j=j: t[i].copy_(t[j]),
                lambda t, i=i, n=number: t[i][n % 4 :].fill_(n),
                lambda t, i=i, j=j: t[i].t().mul_(t[j][:1, 0].clone()),
                lambda t, i=i: t[i].zero_(),
                lambda t, i=i, n=number: t.__setitem__(i, t[i].roll(n, 0)),
                lambda t, i=i, j=j: t.__setitem__(i, torch.where(t[j] > 1, t[i], t[j])),
                lambda t, i=i, j=j: torch.add(t[i], 1, out=t[j]),
                lambda t, i=i, n=number: t[i].view(-1)[n::3].clamp_(max=n + 2),
            ][kind]
        )

    def run() -> list[list[float]]:
        tensors = [torch.arange(12.0).view(4, 3), torch.ones(4, 3), torch.zeros(4, 3), torch.full((4, 3), 2.5)]
        for step in steps:
            step(tensors)
        return [tensor.tolist() for tensor in tensors]

    wanted = run()
    with fake_mode():
        assert run() == wanted
