"""Every operator of `op_db`, in each way to autocast, has the dtypes and errors of `torch.autocast`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from torchext import amp

BF16, FP32 = torch.bfloat16, torch.float32
SAMPLES = 1

OPERATORS = [op for op in op_db if FP32 in op.supported_dtypes("cpu")]

# Python functions that pass the dtype of their arguments to operators.
PASSES_THE_DTYPE = "masked."


def calls(op: Any) -> list[Callable[[], tuple[Any, ...]]]:
    """Return functions that make the arguments of a few calls, new each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sparse tensors in beta state, for example
        samples = list(itertools.islice(op.sample_inputs("cpu", FP32), SAMPLES))

    def maker(sample: Any) -> Callable[[], tuple[Any, ...]]:
        return lambda: on_tensors(lambda t: t.detach().clone(), (sample.input, sample.args, sample.kwargs))

    return [maker(sample) for sample in samples]


def on_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def run(op: Any, arguments: tuple[Any, ...], region: AbstractContextManager[object]) -> Any:
    """Return the result of a call, or the type of its error."""
    torch.manual_seed(0)
    args = arguments[0], *arguments[1]
    try:
        with warnings.catch_warnings(), region:
            warnings.simplefilter("ignore")
            return op.op(*args, **arguments[2])
    except Exception as error:  # any type: all ways must raise
        return type(error)


def metadata(result: Any) -> list[Any]:
    leaves = pytree.tree_leaves(result)
    return [(leaf.dtype, leaf.shape) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves]


def wrap(tensor: Tensor) -> Tensor:
    return amp.wrap(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: f"aten {op.name} {op.variant_test_name}".strip())
class TestOperators:
    def test_identity_and_self_cleaning_regions_are_as_regions(self, op: Any) -> None:
        for make in calls(op):
            wanted = metadata(run(op, make(), torch.autocast("cpu")))
            assert metadata(run(op, make(), amp.autocast("cpu", self_cleaning=True))) == wanted
            arguments = on_tensors(wrap, make())
            if not any(map(amp.is_amp, tensors(arguments))):
                continue
            found = run(op, arguments, nullcontext())
            assert metadata(found) == wanted
            if not op.name.startswith("masked.arg"):  # these use integers internally
                for tensor in tensors(found):
                    assert amp.is_amp(tensor) == (tensor.is_floating_point() or tensor.is_complex())

    def test_results_of_a_self_cleaning_region_can_be_used_after_it(self, op: Any) -> None:
        if op.name.startswith(PASSES_THE_DTYPE):
            pytest.skip(reason="gets the lower dtype from its arguments, and computes in it like any program")
        for make in calls(op):
            wanted = run(op, make(), nullcontext())
            with amp.autocast("cpu", self_cleaning=True):
                arguments = on_tensors(lambda t: t.to(BF16) if t.dtype is FP32 else t, make())
            found = run(op, arguments, nullcontext())
            for one, other in itertools.zip_longest(metadata(found), metadata(wanted)):
                assert one == other or one == (BF16, other[1])  # views and written arguments keep the dtype
            assert all(amp.is_amp(tensor) for tensor in tensors(found) if tensor.dtype is BF16)
