"""Patches of Python functions in PyTorch, for AmpTensors.

They are installed while a tensor is marked (`torchext.internals.leases`). Every patch passes other tensors to the
original, and all tensors where `torch.compile` traces, because its tensors are not AmpTensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from .. import _C
from ..internals import marks  # noqa: F401  (declares patches of both features)
from ..internals.leases import while_marks_live
from ..internals.patching import Concerns, Function

__all__: list[str] = []

# The dtypes that autocast casts.
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


@while_marks_live.replaces(
    torch._C._functorch,
    *("_wrap_for_grad", "_unwrap_for_grad", "_add_batch_dim", "_remove_batch_dim", "_unwrap_batched"),
    reason="copies only PyTorch's own keys",
    concerns=Concerns.MARKS,
)
def _keep_marks(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Mark the wrappers into which transforms of `torch.func` put their arguments, and the results taken out of them.

    A wrapper copies only PyTorch's own keys from its tensor. Without our key, operators would find the marked tensors
    below the transform, after autograd has recorded them in their original dtype.
    """
    result = original(*args, **kwargs)
    tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    made = result[0] if isinstance(result, tuple) else result  # with the former batch dimension
    if tensor is not None and not is_compiling() and made is not tensor:
        _C.make_amp_like(made, tensor)
    return result


@while_marks_live.replaces(
    nn.RNNBase, "check_input", reason="requires the dtype of the weights outside of autocast regions"
)
def _check_input(original: Function, self: nn.RNNBase, tensor: Tensor, batch_sizes: Tensor | None) -> None:
    if not is_compiling() and isinstance(self, nn.RNNBase) and _will_be_cast(tensor, self._flat_weights[0]):
        tensor = torch.empty(tensor.shape, dtype=self._flat_weights[0].dtype, device="meta")  # type: ignore[union-attr]
    original(self, tensor, batch_sizes)


def _will_be_cast(tensor: Any, weight: Any) -> bool:
    """Return True if autocast casts both. They need not be tensors: any class may define `__torch_function__`."""
    if not (isinstance(tensor, Tensor) and isinstance(weight, Tensor)):
        return False
    is_castable = tensor.dtype in CASTABLE and weight.dtype in CASTABLE
    return is_castable and (_C.is_amp(tensor) or _C.is_amp(weight))


# ---- Checkpoints, which recompute in the backward pass as in the forward pass


RECOMPUTES = "recomputes without the marks of the forward pass"
GENERATOR = "_checkpoint_without_reentrant_generator"


# Since 2.14, the second function calls the first.
@while_marks_live.replaces(
    checkpoint, f"{GENERATOR}_impl" if hasattr(checkpoint, f"{GENERATOR}_impl") else GENERATOR, reason=RECOMPUTES
)
def _checkpoint_generator(original: Function, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    return original(function if is_compiling() else _recomputing(function), *args, **kwargs)


@while_marks_live.replaces(checkpoint.CheckpointFunction, "forward", reason=RECOMPUTES)
def _forward(original: Function, ctx: Any, run_function: Function, *args: Any) -> Any:
    outputs = original(ctx, run_function, *args)
    ctx.run_function = _recomputing(run_function)
    return outputs


def _recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` in the regions of the forward pass. `checkpoint` itself enters PyTorch's regions only."""
    has_region_decided = _C.is_region_deciding()
    is_self_cleaning = _C.is_in_self_cleaning_region()
    held = while_marks_live.token()  # recomputed tensors are marked again

    @wraps(function)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        assert held is not None
        with _self_cleaning_again() if is_self_cleaning else nullcontext():
            return _C.call_recomputing(has_region_decided, function, *args, **kwargs)

    return recompute


def _self_cleaning_again() -> ExitStack:
    """Enter a self-cleaning region with the current autocast state, and a disabled region in it if autocast is off."""
    in_use = _C.autocast_device_type_in_use()
    enabled = [device_type for device_type in (in_use, "cpu") if torch.is_autocast_enabled(device_type)]
    device_type = enabled[0] if enabled else in_use
    dtype, is_caching = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
    stack = ExitStack()
    stack.enter_context(_C.AutocastRegion(device_type, dtype=dtype, cache_enabled=is_caching, self_cleaning=True))
    if not enabled:
        stack.enter_context(_C.AutocastRegion(device_type, enabled=False))
    return stack


# ---- Compiled and exported code
#
# Code that AOTAutograd compiles turns autocast off: NOTE [Compiled code in regions].


@while_marks_live.replaces(torch._C._DisableAutocast, "__enter__", reason="turns autocast off in compiled code")
def _enter(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    _C.enter_compiled_code()
    try:
        return original(*args, **kwargs)
    except BaseException:
        _C.leave_compiled_code()
        raise


@while_marks_live.replaces(torch._C._DisableAutocast, "__exit__", reason="turns autocast off in compiled code")
def _exit(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return original(*args, **kwargs)
    finally:
        _C.leave_compiled_code()


@while_marks_live.replaces(
    "torch._decomp.decompositions_for_rng:PhiloxState",
    "reset",
    reason="keeps tensors of the last region that compiled code",
)
def _reset(original: Function, self: Any) -> None:
    """AOTAutograd keeps the tensors of `PhiloxState` after compiling, the last ones permanently."""
    original(self)
    for tensor in (self.seed, self.base_offset):
        _C.unwrap_amp(tensor)  # created in the region that compiles


@while_marks_live.replaces("torch.export._trace", "_export", "_export_for_training", reason="exports without marks")
def _export(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    for leaf in pytree.tree_leaves((args, kwargs)):
        if any(_C.is_amp(tensor) for tensor in _tensors_of(leaf)):
            raise NotImplementedError(
                f"torch.export was given AmpTensors, in a {type(leaf).__name__}: an exported program has none. "
                "Call amp.unwrap(), and enter amp.autocast() in the exported module."
            )
    return original(*args, **kwargs)


def _tensors_of(leaf: object) -> Iterable[Tensor]:
    if isinstance(leaf, nn.Module):
        return chain(leaf.parameters(), leaf.buffers())
    return [leaf] if isinstance(leaf, Tensor) else []


# ---- Regions in function modes, for non-strict `torch.export`


_torch: Any = torch


def _tell_modes(region: _C.AutocastRegion, begins: bool) -> None:
    """Report a region. The core calls this when a region begins or ends while a function mode is active."""
    module: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if module is None:
        return  # nothing is being exported
    for mode in _torch.overrides._get_current_function_mode_stack():
        if isinstance(mode, module.PreDispatchTorchFunctionMode):
            _trace(mode, region, begins)


def _trace(mode: Any, region: _C.AutocastRegion, begins: bool) -> None:
    if region.self_cleaning:
        raise NotImplementedError(
            "torch.export cannot trace a self-cleaning region: an exported program has no AmpTensors. Export with "
            "amp.autocast(), and cast what leaves the region."
        )
    if begins:
        device_type = region.device_type or _C.autocast_device_type_in_use()
        state = (
            device_type,
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_enabled(device_type),
            torch.is_autocast_cache_enabled(),
        )
        mode.__torch_function__(_torch.amp._enter_autocast, (), state)
    else:
        mode.__torch_function__(_torch.amp._exit_autocast, (), ())


_C.provide("notify_modes", _tell_modes)
