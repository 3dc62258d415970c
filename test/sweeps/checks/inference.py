"""The RFC's first goal: a call in inference mode has the same result as under no_grad, or raises an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from sweeps.operators import UNINITIALIZED, Arguments, Visit, check
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torchext.inference import inference_mode

Mode = Callable[[], AbstractContextManager[Any]]


def outcome(
    op: Callable[..., Any], mode: Mode, arguments: Arguments, copy_inside: bool
) -> tuple[list[Any], Exception | None]:
    """Return the leaves of the result, and those of the arguments after the call, or an error."""
    torch.manual_seed(0)
    with torch.no_grad():
        given = arguments.map(Tensor.clone)
    with mode():
        if copy_inside:
            given = arguments.map(Tensor.clone)  # inference tensors
        try:
            result = given.call(op)
        except Exception as error:
            return [], error
        return tree_leaves((result, given)), None


@check(samples=(1, 2, 2), concerns=lambda op: op.name not in UNINITIALIZED)
def inference_mode_equals_no_grad(visit: Visit) -> None:
    # LAPACK's rounding depends on the addresses of its arguments.
    tolerance = {} if "linalg" in visit.op.name else {"rtol": 0, "atol": 0}
    for variant in (visit.op.op, visit.op.get_inplace()):
        if variant is not None:
            compare(variant, visit.arguments(), tolerance)


def compare(op: Callable[..., Any], arguments: Arguments, tolerance: dict[str, float]) -> None:
    wanted, error = outcome(op, torch.no_grad, arguments, copy_inside=False)
    for copy_inside in (False, True):
        found, found_error = outcome(op, inference_mode, arguments, copy_inside)
        if found_error is None:
            assert error is None, error
            assert_same(found, wanted, tolerance)
        else:
            # The RFC's "some operations may not be supported": those that PyTorch's mode does not support.
            _, their_error = outcome(op, torch.inference_mode, arguments, copy_inside)
            assert str(found_error) == str(their_error)


def assert_same(found: list[Any], wanted: list[Any], tolerance: dict[str, float]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, Tensor):
            assert (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)
            torch.testing.assert_close(one, other, equal_nan=True, **tolerance)
        elif isinstance(other, int | float | str | bool):
            assert one == other or (one != one and other != other)
