"""Distributed tensors of fakes.

Before PyTorch 2.13, operators on them need help. The `Fake` key was above `Python` then, and `dispatchDTensorOp()` in
`python_variable.cpp` calls the operator on the local tensors with all keys above `Python` excluded. If arguments have
to be redistributed first, it leaves the call to Python, where the patch of `OpOverload.__call__` in `tensors.py`
restores the keys. The patch here therefore makes it redistribute always, from the present placements to the same
placements.

Some operators have their own handlers (`OpDispatcher._custom_op_handlers`). These are called in the same state, and
call PyTorch functions as well as operators.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch

from ... import _C
from ...internals.leases import while_fakes_live
from ...internals.patching import Function
from ...internals.torch_release import DIFFERENCES

__all__: list[str] = []

DISPATCH = "torch.distributed.tensor._dispatch"

# The handlers of 2.11 and 2.12, by module.
HANDLERS = {
    DISPATCH: ("as_strided_handler", "found_inf_reduce_handler", "is_pinned_handler", "is_same_size_handler"),
    "torch.distributed.tensor._nonlinear_redux": ("argminmax_handler", "minmax_dim_handler"),
    "torch.distributed.tensor._tp_conv": ("convolution_handler", "convolution_backward_handler"),
    "torch.distributed.tensor.parallel.loss": (
        *("_log_softmax_handler", "_log_softmax_backward_handler"),
        *("_nll_loss_forward_handler", "_nll_loss_backward_handler"),
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention": ("_sdpa_handler",),
}


def _leave_call_to_python(
    original: Function, self: Any, op_call: Any, args: Any, kwargs: Any, op_info: Any, try_cache: bool
) -> Any:
    sharding = original(self, op_call, args, kwargs, op_info, try_cache)
    if not dataclasses.is_dataclass(sharding) or getattr(sharding, "needs_redistribute", True):
        return sharding
    return dataclasses.replace(sharding, needs_redistribute=True, redistribute_schema=op_info.schema)  # type: ignore[type-var]


def _clear_cache() -> None:
    """Clear the cache before the patch is installed: its results for real tensors would bypass the patch."""
    torch._C._clear_DTensor_sharding_propagator_cache()


if DIFFERENCES["fake_above_python"].applies:
    _replaces = partial(while_fakes_live.replaces, releases=DIFFERENCES["fake_above_python"].releases)
    _replaces(
        f"{DISPATCH}:OpDispatcher",
        "_propagate_op_sharding_dispatch_slow_path",
        reason="calls operators on local tensors below the Fake key",
    )(_leave_call_to_python)
    while_fakes_live.declare_after_import(DISPATCH, _clear_cache)
    for _owner, _names in {f"{DISPATCH}:OpDispatcher": ("redistribute_local_args",), **HANDLERS}.items():
        for _name in _names:
            _replaces(_owner, _name, needs=_name, reason="computes on local tensors below the Fake key")(
                _C.call_from_handler
            )
