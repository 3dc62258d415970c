"""Each way to autocast has the dtypes and errors of `torch.autocast`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from comparisons import metadata, outcome
from sweeps.operators import Arguments, OnTensor, Visit, check, tensors_in
from torch import Tensor
from torch.utils import _pytree as pytree

from torchext import amp

BF16, FP32 = torch.bfloat16, torch.float32

# Python functions that pass the dtype of their arguments to operators, so that they compute in the lower dtype, like
# any program.
PASSES_THE_DTYPE = "masked."


def copies(visit: Visit, change: OnTensor = lambda tensor: tensor) -> Arguments:
    return visit.arguments(lambda tensor: change(tensor.detach().clone()))


def run(visit: Visit, arguments: Arguments, region: AbstractContextManager[object]) -> Any:
    """Return the result of a call, or its error. All ways must raise, but the errors may differ."""

    def call() -> Any:
        with region:
            return arguments.call(visit.op.op)

    torch.manual_seed(0)
    return outcome(call)


def shapes_and_dtypes(result: Any) -> Any:
    return metadata(result, {"shape", "dtype"})


def wrap(tensor: Tensor) -> Tensor:
    return amp.to_amp(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor


@check(samples=(1, 1, 1))
def identity_and_self_cleaning_regions_are_as_regions(visit: Visit) -> None:
    wanted = shapes_and_dtypes(run(visit, copies(visit), torch.autocast("cpu")))
    assert shapes_and_dtypes(run(visit, copies(visit), amp.autocast("cpu", self_cleaning=True))) == wanted
    arguments = copies(visit, wrap)
    if not any(map(amp.is_amp, arguments.tensors)):
        return
    found = run(visit, arguments, nullcontext())
    assert shapes_and_dtypes(found) == wanted
    if not visit.op.name.startswith("masked.arg"):  # these use integers internally
        for tensor in tensors_in(found):
            assert amp.is_amp(tensor) == (tensor.is_floating_point() or tensor.is_complex())


@check(samples=(1, 1, 1), concerns=lambda op: not op.name.startswith(PASSES_THE_DTYPE))
def results_of_a_self_cleaning_region_can_be_used_after_it(visit: Visit) -> None:
    wanted = run(visit, copies(visit), nullcontext())
    with amp.autocast("cpu", self_cleaning=True):
        arguments = copies(visit, lambda tensor: tensor.to(BF16) if tensor.dtype is FP32 else tensor)
    found = run(visit, arguments, nullcontext())
    for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
        seen, expected = shapes_and_dtypes(one), shapes_and_dtypes(other)
        assert seen in (expected, expected | {"dtype": BF16})  # views and written arguments keep the dtype
    assert all(amp.is_amp(tensor) for tensor in tensors_in(found) if tensor.dtype is BF16)
