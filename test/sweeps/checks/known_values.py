"""Known values of fakes equal those of the real run, also of calls in place and with `out=`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import kept_threads
from comparisons import LOOSE_PROPERTIES, metadata
from sweeps.checks.fakes import NEEDS_VALUES
from sweeps.checks.layouts import LAYOUTS
from sweeps.operators import Arguments, OnTensor, Visit, check, full_name, tensors_in
from torch import Tensor

from torchext import _C
from torchext.fake import DataDependentError, fake_like, fake_mode, is_fake

Call = Callable[[Arguments], Any]

# Values that kernels refuse as positions, lengths, pivots or divisors.
HOSTILE: tuple[OnTensor, ...] = (lambda tensor: tensor + 100, lambda tensor: -tensor - 100, torch.zeros_like)

# PyTorch's Python operator has no CPU kernel that could be tried out, and others read or write memory at any position.
NOT_TRIED_OUT = {
    "linalg.ldl_solve",
    *("nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none"),
    "nn.functional.ctc_loss",
}

LACKS_VALUES = "lacks values"

COMPARED = LOOSE_PROPERTIES | {"storage_offset"}


def calls_of(visit: Visit) -> Iterator[Call]:
    """Yield the variants of a call."""
    op = visit.op
    yield lambda arguments: arguments.call(op.op)
    in_place = op.inplace_variant
    if in_place is not None:
        yield lambda arguments: arguments.call(in_place)
    if op.supports_out:
        yield lambda arguments: arguments.call(op.op, out=torch.empty(0, dtype=visit.sample.input.dtype))


def outcome(call: Call, arguments: Arguments) -> list[Tensor] | None:
    """Return the tensors of the result and the arguments, which the call may change, or None if it raises."""
    try:
        return tensors_in((call(arguments), arguments))
    except Exception:  # other checks and test_refusals.py compare errors
        return None


def same(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())


# The results of LAPACK's least squares depend on where the matrices are in memory.
@check(samples=(2, 5, 5), dtypes=(torch.float32, torch.int64), concerns=lambda op: op.name != "linalg.lstsq")
def known_values_are_those_of_the_real_run(visit: Visit) -> None:
    def copies() -> Arguments:
        return visit.arguments(lambda tensor: tensor.detach().clone())

    for call in calls_of(visit):
        with torch.random.fork_rng(devices=[]):
            # Results that differ between two real calls are random or uninitialized.
            wanted, again = outcome(call, copies()), outcome(call, copies())
            with fake_mode():
                found = outcome(call, copies().map(fake_like))
        if wanted is None or again is None or found is None:
            continue
        for real, repeated, fake in zip(wanted, again, found, strict=True):
            known = _C.known_value(fake) if is_fake(fake) else None
            if known is not None and same(real, repeated):
                assert same(known, real), (known, real)


@check(samples=(1, 3, None), dtypes=(torch.int64,))
def results_on_known_values_are_laid_out_as_real_ones(visit: Visit) -> None:
    if not visit.is_strided:
        return
    copies = visit.arguments(lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))
    for change in LAYOUTS:
        wanted = outcome(lambda call: call.call(visit.op.op), copies.map(Tensor.clone).map(change))
        with fake_mode():
            fakes = copies.map(fake_like).map(change)
            found = outcome(lambda call: call.call(visit.op.op), fakes)
        if wanted is None or found is None:
            assert (wanted is None) == (found is None) or visit.name in NEEDS_VALUES | {"to_sparse"}, change.__name__
        elif all(tensor.layout is torch.strided for tensor in wanted):
            assert metadata(found, COMPARED) == metadata(wanted, COMPARED), change.__name__


def is_integral(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool


def error_of(visit: Visit, on_integers: OnTensor, on_others: OnTensor) -> str | None:
    arguments = visit.arguments(
        lambda tensor: on_integers(tensor) if is_integral(tensor) else on_others(tensor.detach()).clone()
    )
    try:
        with kept_threads():
            torch.set_num_threads(1)  # otherwise the first thread that finds an error raises it
            arguments.call(visit.op)
    except DataDependentError:
        return LACKS_VALUES
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def without_values(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


@check(samples=(2, 6, None), dtypes=(torch.float32,), concerns=lambda op: full_name(op) not in NOT_TRIED_OUT)
def errors_about_known_integers_are_those_of_the_real_run(visit: Visit) -> None:
    tensors = visit.arguments().tensors
    if not visit.is_strided or not any(map(is_integral, tensors)) or all(map(is_integral, tensors)):
        return
    if visit.sample.kwargs.get("unsafe"):  # `segment_reduce()` does not check its lengths then
        return
    for change in HOSTILE:
        wanted = error_of(visit, change, torch.clone)
        if wanted != error_of(visit, change, torch.ones_like):
            continue  # depends on values that fakes lack
        for _ in range(2):
            with fake_mode():
                found = error_of(visit, lambda tensor, change=change: fake_like(change(tensor)), without_values)
            assert found in (wanted, LACKS_VALUES)
