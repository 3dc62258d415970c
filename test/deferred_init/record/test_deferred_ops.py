"""Every operator of `op_db`, called in a constructor: materialized results equal eager ones, bit for bit.

The exceptions are the table below, and each entry is checked to be needed.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.tools.torch_release import TORCH_RELEASE

pytestmark = pytest.mark.skipif(
    TORCH_RELEASE != (2, 13), reason="Meta kernels, and so the table, differ between releases"
)

DTYPES = (torch.float32,)
SAMPLES = 3

# The results of LAPACK's least squares depend on where the matrices are in memory.
NOT_REPRODUCIBLE = {"linalg.lstsq", "linalg.lstsq.grad_oriented"}
NO_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


def full_name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def made_inside(value: object) -> object:
    """A copy of a tensor, which deferred_init records."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype).copy_(value)


def run(op: OpInfo, sample: SampleInput) -> list[Any]:
    input_, args, kwargs = tree_map(made_inside, (sample.input, sample.args, sample.kwargs))
    leaves: list[Any] = tree_leaves(op(input_, *args, **kwargs))
    return leaves


def in_eager(op: OpInfo, sample: SampleInput) -> list[Any] | None:
    try:
        return run(op, sample)
    except Exception:  # a sample that this build of PyTorch cannot run
        return None


def assert_same(found: Any, wanted: Any, with_values: bool) -> None:
    if not isinstance(wanted, Tensor):
        assert type(found) is type(wanted)
        assert found == wanted or found != found
        return
    if is_deferred(found):
        materialize_tensor(found)
    assert (found.shape, found.dtype, found.layout) == (wanted.shape, wanted.dtype, wanted.layout)
    if wanted.layout is torch.strided:
        assert found.stride() == wanted.stride()
        assert found.storage_offset() == wanted.storage_offset()
    if with_values:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def compare(op: OpInfo, dtype: torch.dtype) -> None:
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), SAMPLES):
        torch.manual_seed(0)
        wanted = in_eager(op, sample)
        if wanted is None:
            continue
        generator_state = torch.get_rng_state()
        torch.manual_seed(0)
        found = deferred_init(run, op, sample)
        assert torch.equal(torch.get_rng_state(), generator_state)
        for found_leaf, wanted_leaf in zip(found, wanted, strict=True):
            assert_same(found_leaf, wanted_leaf, with_values=op.name not in NO_VALUES)


class TestDeferredOperators(TestCase):
    @ops([op for op in op_db if full_name(op) not in NOT_REPRODUCIBLE], allowed_dtypes=DTYPES)
    def test_constructor_that_calls_it_is_exact(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samples that are meant to provoke them
            compare(op, dtype)


instantiate_device_type_tests(TestDeferredOperators, globals(), only_for="cpu")
