"""The storages of results and gradients of fakes have the sizes of eager ones, for every operator of `op_db`.

The arguments are unmodified, with reversed strides, and with gaps between the elements.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from torchext.fake import fake_like, fake_mode
from torchext.tools.torch_release import TORCH_RELEASE

pytestmark = pytest.mark.skipif(TORCH_RELEASE != (2, 13), reason="Meta kernels differ between releases")

DTYPES = (torch.float32,)
LARGEST = 5000


def reversed_strides(tensor: Tensor) -> Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return torch.empty(tuple(reversed(tensor.shape)), dtype=tensor.dtype).permute(order).copy_(tensor)


def with_gaps(tensor: Tensor) -> Tensor:
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0].copy_(tensor)


CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (torch.clone, reversed_strides, with_gaps)


def changed(change: Callable[[Tensor], Tensor], inputs: Any) -> Any:
    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return change(value.detach()).requires_grad_(value.requires_grad)

    return tree_map(leaf, inputs)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def sizes(tensors: list[Tensor]) -> list[tuple[torch.Size, int]]:
    return [(t.shape, t.untyped_storage().nbytes()) for t in tensors if t.layout is torch.strided]


def storage_sizes(op: OpInfo, inputs: Any) -> tuple[list[tuple[torch.Size, int]], ...]:
    """Return the sizes of the results and of the gradients."""
    args, kwargs = inputs
    results = tensors_in(op(*args, **kwargs))
    wanted = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    roots = [tensor.abs().sum() for tensor in results if tensor.requires_grad]
    gradients = torch.autograd.grad(roots, wanted, allow_unused=True) if wanted and roots else ()
    return sizes(results), sizes(tensors_in(gradients))


def compare(op: OpInfo, dtype: torch.dtype, samples: int) -> None:
    for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), samples):
        inputs = ((sample.input, *sample.args), sample.kwargs)
        if any(t.layout is not torch.strided or t.numel() > LARGEST for t in tensors_in(inputs)):
            continue
        for change in CHANGES:
            made = changed(change, inputs)
            fakes = tree_map(lambda leaf: fake_like(leaf) if isinstance(leaf, Tensor) else leaf, made)
            try:
                expected = storage_sizes(op, made)
                with fake_mode():
                    found = storage_sizes(op, fakes)
            except Exception:  # test_op_db.py compares errors
                continue
            assert found == expected, (sample, change)


class TestStorageSizes(TestCase):
    @ops(op_db, allowed_dtypes=DTYPES)
    def test_storages_have_the_sizes_of_eager_ones(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compare(op, dtype, samples=1)

    @pytest.mark.long
    @ops(op_db, allowed_dtypes=DTYPES)
    def test_storages_have_the_sizes_of_eager_ones_in_more_samples(
        self, device: str, dtype: torch.dtype, op: OpInfo
    ) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compare(op, dtype, samples=8)


instantiate_device_type_tests(TestStorageSizes, globals(), only_for="cpu")
