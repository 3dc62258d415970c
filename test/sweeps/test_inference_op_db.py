"""The RFC's first goal: a call in inference mode has the same result as under no_grad, or raises an error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

from torchext.inference import inference_mode

# The values of their results are uninitialized memory.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
SAMPLES = 2

Mode = Callable[[], AbstractContextManager[Any]]


def copied(inputs: Any) -> Any:
    """Return the arguments with copies of the tensors, which are inference tensors inside the mode."""
    return tree_map(lambda value: value.clone() if isinstance(value, Tensor) else value, inputs)


def outcome(op: Callable[..., Any], mode: Mode, inputs: Any, copy_inside: bool) -> tuple[list[Any], Exception | None]:
    """Return the leaves of the result, and those of the arguments after the call, or an error."""
    torch.manual_seed(0)
    with torch.no_grad():
        args, kwargs = copied(inputs)
    with mode():
        if copy_inside:
            args, kwargs = copied(inputs)
        try:
            result = op(*args, **kwargs)
        except Exception as error:
            return [], error
        return tree_leaves((result, args, kwargs)), None


class TestOpDb(TestCase):
    @ops([op for op in op_db if op.name not in UNINITIALIZED], allowed_dtypes=(torch.float32,))
    def test_equals_no_grad(self, device: str, dtype: torch.dtype, op: OpInfo) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of samples that provoke them
            for _, sample in zip(range(SAMPLES), op.sample_inputs(device, dtype, requires_grad=True), strict=False):
                inputs = ((sample.input, *sample.args), sample.kwargs)
                for variant in (op.op, op.get_inplace()):
                    if variant is not None:
                        # LAPACK's rounding depends on the addresses of its arguments.
                        self.compare(variant, inputs, {} if "linalg" in op.name else {"rtol": 0, "atol": 0})

    def compare(self, op: Callable[..., Any], inputs: Any, tolerance: dict[str, float]) -> None:
        wanted, error = outcome(op, torch.no_grad, inputs, copy_inside=False)
        for copy_inside in (False, True):
            found, found_error = outcome(op, inference_mode, inputs, copy_inside)
            if found_error is None:
                assert error is None, error
                self.assert_same(found, wanted, tolerance)
            else:
                # The RFC's "some operations may not be supported": those that PyTorch's mode does not support.
                _, their_error = outcome(op, torch.inference_mode, inputs, copy_inside)
                assert str(found_error) == str(their_error)

    def assert_same(self, found: list[Any], wanted: list[Any], tolerance: dict[str, float]) -> None:
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            if isinstance(other, Tensor):
                assert (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
                torch.testing.assert_close(one, other, equal_nan=True, **tolerance)
            elif isinstance(other, int | float | str | bool):
                assert one == other or one != one


instantiate_device_type_tests(TestOpDb, globals(), only_for=("cpu",))
