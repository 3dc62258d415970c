"""Operators with an `out` of another size or layout: fakes and deferred tensors end like eager ones.

The calls are those of `op_db`, once unmodified and once with the strides of all arguments reversed. With
`--long`, there are more samples, and more kinds of `out`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from common import assert_same_tensor
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from torchext.deferred_init import deferred_init, is_deferred, materialize_tensor
from torchext.fake import DataDependentError, UnsupportedOperatorError, fake_like, fake_mode
from torchext.tools.torch_release import TORCH_RELEASE

pytestmark = pytest.mark.skipif(TORCH_RELEASE != (2, 13), reason="Meta kernels differ between releases")

DTYPES = (torch.float32,)

# Results are uninitialized, depend on addresses of matrices, or differ between eager calls, because the kernel reads
# the `out` before it writes it.
NO_VALUES = {"empty", "linalg.lstsq", "native_batch_norm", "_native_batch_norm_legit"}

Outputs = list[Tensor]
Make = Callable[[Tensor], Tensor]

FEW: dict[str, Make] = {
    "empty": lambda t: t.new_empty(0),
    "turned": lambda t: t.new_zeros(tuple(reversed(t.shape))),
    "permuted": lambda t: t.new_zeros(tuple(reversed(t.shape))).permute(*reversed(range(t.dim()))),
}
MANY: dict[str, Make] = {
    **FEW,
    "small": lambda t: t.new_zeros(max(t.numel() // 2, 1)),
    "large": lambda t: t.new_zeros(t.numel() * 2 + 3),
    "flat": lambda t: t.new_zeros(t.numel()),
    "with gaps": lambda t: t.new_zeros((*t.shape, 2))[..., 0],
    "view": lambda t: t.new_zeros(t.numel() + 7)[3:5],
    "column": lambda t: t.new_zeros(3, t.numel() + 1)[:, 1],
}


def same_storage_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, storage offset and storage size."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage(), 0, (size,), (1,))
    copy = torch.empty(size, dtype=tensor.dtype).copy_(whole)
    return copy.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def reversed_strides(tensor: Tensor) -> Tensor:
    order = tuple(reversed(range(tensor.dim())))
    return torch.empty(tuple(reversed(tensor.shape)), dtype=tensor.dtype).permute(order).copy_(tensor)


def on_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


class Call:
    """A call of an operator with outputs, which is built anew each time."""

    def __init__(self, op: OpInfo, inputs: Any, make: Make, results: Outputs) -> None:
        self.op, self.inputs, self.make, self.results = op, inputs, make, results

    def run(self, change: Callable[[Tensor], Tensor]) -> Outputs:
        args, kwargs = on_tensors(change, self.inputs)
        outputs = [change(self.make(result)) for result in self.results]
        self.op.op(*args, **kwargs, out=outputs[0] if len(outputs) == 1 else tuple(outputs))
        return outputs


def calls(op: OpInfo, dtype: torch.dtype, makes: dict[str, Make], samples: int) -> Iterator[Call]:
    for sample in itertools.islice(op.sample_inputs("cpu", dtype), samples):
        inputs = ((sample.input, *sample.args), sample.kwargs)
        if any(isinstance(leaf, Tensor) and leaf.layout is not torch.strided for leaf in tree_leaves(inputs)):
            continue
        for change in (same_storage_copy, reversed_strides):
            with torch.no_grad():
                changed = on_tensors(change, inputs)
                results = results_of(op, changed)
                yield from (Call(op, changed, make, results) for make in makes.values() if results)


def results_of(op: OpInfo, inputs: Any) -> Outputs:
    args, kwargs = on_tensors(same_storage_copy, inputs)
    try:
        return [leaf for leaf in tree_leaves(op(*args, **kwargs)) if isinstance(leaf, Tensor)]
    except Exception:  # a sample that this build of PyTorch cannot run
        return []


def outcome(run: Callable[[], Outputs]) -> Outputs | None:
    torch.manual_seed(0)
    try:
        return run()
    except (DataDependentError, UnsupportedOperatorError):
        raise
    except Exception:
        return None


def geometry(tensor: Tensor) -> object:
    strides = tuple(s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1) if tensor.numel() else ()
    nbytes = tensor.untyped_storage().nbytes()
    return tuple(tensor.shape), strides, tensor.dtype, tensor.storage_offset(), nbytes


def assert_fits(tensor: Tensor) -> None:
    if tensor.numel():
        last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        assert (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def compare(call: Call) -> None:
    wanted = outcome(lambda: call.run(same_storage_copy))
    try:
        with fake_mode():
            found = outcome(lambda: call.run(fake_like))
    except (DataDependentError, UnsupportedOperatorError):
        found = wanted
    assert (found is None) == (wanted is None)
    assert [geometry(t) for t in found or []] == [geometry(t) for t in wanted or []]
    deferred = outcome(lambda: deferred_init(call.run, same_storage_copy))
    assert (deferred is None) == (wanted is None)
    for tensor, expected in zip(deferred or [], wanted or [], strict=True):
        assert geometry(tensor) == geometry(expected)
        assert_fits(tensor)
        if is_deferred(tensor):
            materialize_tensor(tensor)
        assert geometry(tensor) == geometry(expected)
        if call.op.name not in NO_VALUES:
            assert_same_tensor(tensor.contiguous(), expected.contiguous(), strictly=False)


class TestOutputs(TestCase):
    @ops([op for op in op_db if op.supports_out], allowed_dtypes=DTYPES)
    def test_out_ends_like_the_eager_one(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of outputs that are resized
            for call in calls(op, dtype, FEW, samples=1):
                compare(call)

    @pytest.mark.long
    @ops([op for op in op_db if op.supports_out], allowed_dtypes=DTYPES)
    def test_any_out_ends_like_the_eager_one(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of outputs that are resized
            for call in calls(op, dtype, MANY, samples=5):
                compare(call)


instantiate_device_type_tests(TestOutputs, globals(), only_for="cpu")
