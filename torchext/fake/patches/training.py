"""Patches of PyTorch's Python code for training with fakes: gradients, optimizers and distributed tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ... import _C
from ...internals.dispatch_keys import making_fakes
from ...internals.leases import while_fakes_live
from ...internals.patching import DIFFERENCES, Function
from ..copying import FakeCopy

__all__: list[str] = []


# ---- Allocations of Python functions in backward passes
#
# Gradient formulas in C++ are observed: csrc/extensions/composites/gradient_formulas.h.


# It recomputes the user's functions, whose factories make real tensors.
CHECKPOINT = "torch.utils.checkpoint"


def _hook(count: int, original: Function, /, *args: Any, **kwargs: Any) -> None:
    """Wrap the last two of `count` arguments, which pack and unpack a tensor."""
    # Errors about wrong arguments quote the arguments. aot_autograd inspects hooks that are graphs, and these do
    # not call functions of the program.
    is_method = not args[:-2] or isinstance(args[0], torch._C._autograd.SavedTensor)
    are_hooks = not kwargs and len(args) == count and is_method and all(map(callable, args[-2:]))
    if not are_hooks or any(isinstance(one, torch.fx.GraphModule) for one in args[-2:]):
        original(*args, **kwargs)
        return
    outside = (update_wrapper(partial(_C.call_outside_of_formula, one), one) for one in args[-2:])
    original(*args[:-2], *outside)


for _owner, _name, _count in (
    (torch._C._autograd, "_push_saved_tensors_default_hooks", 2),
    (torch._C._autograd.SavedTensor, "register_hooks", 3),
):
    while_fakes_live.replaces(_owner, _name, reason="makes formulas call functions of the program")(
        partial(_hook, _count)
    )


FUNCTIONS_ALLOCATE = "lets functions allocate, such as the compiled ones of aot_autograd"


@while_fakes_live.replaces(BackwardCFunction, "apply_boxed", needs="apply_boxed", reason=FUNCTIONS_ALLOCATE)
@while_fakes_live.replaces(BackwardCFunction, "apply", reason=FUNCTIONS_ALLOCATE)
def _apply(original: Function, self: Any, *args: Any) -> Any:
    module: str = getattr(getattr(self, "_forward_cls", None), "__module__", "")
    if not module.startswith("torch.") or module == CHECKPOINT:
        return original(self, *args)
    with _factories_like(args[0] if len(args) == 1 and isinstance(args[0], list) else args):
        return original(self, *args)


KINDS = (_C.is_deferred, _C.is_fake)


@contextmanager
def _factories_like(gradients: Any) -> Iterator[None]:
    """Let factories make tensors like those among `gradients`: deferred, fake or real."""
    # Computed before, because a function may free the gradients that it receives in a list.
    is_deferred, is_fake = (any(isinstance(one, Tensor) and check(one) for one in gradients) for check in KINDS)
    if is_deferred:
        _C.enter_deferred_init()
        try:
            yield
        finally:
            _C.leave_deferred_init()
    elif is_fake:
        with making_fakes():
            yield
    else:
        yield


# ---- Optimizers, whose state and steps mix fakes with real or sparse tensors


# By name, because `torch.optim` deletes the names of its modules.
@while_fakes_live.replaces(
    "torch.optim.adagrad", "adagrad", reason="coalesces gradients, which hides their number of elements"
)
@while_fakes_live.replaces(
    "torch.optim._functional", "sparse_adam", reason="coalesces gradients, which hides their number of elements"
)
def _step(original: Function, /, params: list[Tensor], grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """The number of elements of coalesced gradients does not affect any metadata."""
    return original(params, [_as_if_coalesced(grad) for grad in grads], *args, **kwargs)


def _as_if_coalesced(grad: Tensor) -> Tensor:
    if not _C.is_fake(grad) or grad.layout is not torch.sparse_coo or grad.is_coalesced():
        return grad
    return torch.sparse_coo_tensor(
        grad._indices(), grad._values(), grad.shape, is_coalesced=True, check_invariants=False
    )


@while_fakes_live.replaces(
    torch.optim.Optimizer,
    "_process_value_according_to_param_policy",
    reason="keeps real tensors, into which step() would write fakes",
)
def _take_over(
    original: Function, param: Tensor, value: Tensor, param_id: int, param_groups: list[Any], key: object = None
) -> Any:
    """`Optimizer.load_state_dict()` keeps the tensors that this returns."""
    taken = original(param, value, param_id, param_groups, key)
    if not _C.is_fake(param) or _C.is_deferred(param) or _C.is_fake(taken):
        return taken
    return FakeCopy(None).tensor(taken)


# ---- Distributed tensors
#
# Before PyTorch 2.13, operators on them need help. The `Fake` key was above `Python` then, and `dispatchDTensorOp()` in
# `python_variable.cpp` calls the operator on the local tensors with all keys above `Python` excluded. If arguments have
# to be redistributed first, it leaves the call to Python, where the patch of `OpOverload.__call__` in `tensors.py`
# restores the keys. The patch here therefore makes it redistribute always, from the present placements to the same
# placements.
#
# Some operators have their own handlers (`OpDispatcher._custom_op_handlers`). These are called in the same state, and
# call PyTorch functions as well as operators.


DISPATCH = "torch.distributed.tensor._dispatch"

# The handlers of 2.11 and 2.12, by module.
HANDLERS: dict[str, tuple[str, ...]] = {
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
    for _kind, _names in {f"{DISPATCH}:OpDispatcher": ("redistribute_local_args",), **HANDLERS}.items():
        for _name in _names:
            _replaces(_kind, _name, needs=_name, reason="computes on local tensors below the Fake key")(
                _C.call_from_handler
            )
