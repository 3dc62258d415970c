"""The few places where PyTorch's Python code has to know about AmpTensors.

They are in place while a tensor is marked (`torchext.tools.leases`). Every patch hands other tensors to the original,
unchanged, and all of them where `torch.compile` traces, whose tensors are not AmpTensors.
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
from ..tools import marks  # noqa: F401  (declares what is replaced for both features)
from ..tools.imports import when_imported
from ..tools.leases import while_marks_live
from ..tools.patching import Concerns

__all__: list[str] = []

# Of dtypes that autocast casts.
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def _patch_torch_func() -> None:
    """Transforms of functions put arguments in wrappers, which are to be what those are, and take results out of them.

    A wrapper takes over only the keys that PyTorch knows of. Without ours, operators would meet marked tensors below
    the transform, after autograd has recorded them in the dtype that they had.
    """
    reason = "hands on only the keys that PyTorch knows of"
    for name in ("_wrap_for_grad", "_unwrap_for_grad", "_add_batch_dim", "_remove_batch_dim", "_unwrap_batched"):
        while_marks_live.patch(torch._C._functorch, name, _keeping_marks, reason, concerns=Concerns.MARKS)


def _keeping_marks(original: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tensor = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        made = result[0] if isinstance(result, tuple) else result  # with the dimension that was the batch's
        if tensor is not None and not is_compiling() and made is not tensor:
            _C.make_amp_like(made, tensor)
        return result

    return function


def _patch_recurrent_modules() -> None:
    """RNN, LSTM and GRU want an input in the dtype of their weights, unless they are in a region of autocast."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def check_input(self: nn.RNNBase, tensor: Tensor, batch_sizes: Tensor | None) -> None:
            if not is_compiling() and isinstance(self, nn.RNNBase) and _will_be_cast(tensor, self._flat_weights[0]):
                tensor = torch.empty(tensor.shape, dtype=self._flat_weights[0].dtype, device="meta")  # type: ignore[union-attr]
            original(self, tensor, batch_sizes)

        return check_input

    while_marks_live.patch(
        nn.RNNBase, "check_input", make, "wants the dtype of the weights, unless a region of autocast is open"
    )


def _will_be_cast(tensor: Any, weight: Any) -> bool:
    """Not everything that an RNN is given need be a tensor: `__torch_function__` is a protocol for any class."""
    if not (isinstance(tensor, Tensor) and isinstance(weight, Tensor)):
        return False
    is_castable = tensor.dtype in CASTABLE and weight.dtype in CASTABLE
    return is_castable and (_C.is_amp(tensor) or _C.is_amp(weight))


def _patch_checkpoint() -> None:
    """What a backward pass computes again is to do as it did in the forward pass."""
    # Called by the other since 2.14.
    implementation = "_checkpoint_without_reentrant_generator_impl"
    name = implementation if hasattr(checkpoint, implementation) else "_checkpoint_without_reentrant_generator"

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return original(function if is_compiling() else _recomputing(function), *args, **kwargs)

        return generator

    while_marks_live.patch(checkpoint, name, make, "computes again without the marks of the forward pass")


def _patch_reentrant_checkpoint() -> None:
    """The same for `use_reentrant=True`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            outputs = original(ctx, run_function, *args)
            ctx.run_function = _recomputing(run_function)
            return outputs

        return forward

    while_marks_live.patch(
        checkpoint.CheckpointFunction, "forward", make, "computes again without the marks of the forward pass"
    )


def _recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint` enters regions like those that it was called in, but they are PyTorch's."""
    has_region_decided = _C.is_region_deciding()
    is_self_cleaning = _C.is_in_self_cleaning_region()
    held = while_marks_live.token()  # what is computed again is marked again

    @wraps(function)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        assert held is not None
        with _self_cleaning_again() if is_self_cleaning else nullcontext():
            return _C.call_recomputing(has_region_decided, function, *args, **kwargs)

    return recompute


def _self_cleaning_again() -> ExitStack:
    """A self-cleaning region for what operators autocast to now, and a disabled one in it, if they do not."""
    in_use = _C.autocast_device_type_in_use()
    enabled = [device_type for device_type in (in_use, "cpu") if torch.is_autocast_enabled(device_type)]
    device_type = enabled[0] if enabled else in_use
    dtype, is_caching = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
    stack = ExitStack()
    stack.enter_context(_C.AutocastRegion(device_type, dtype=dtype, cache=is_caching, self_cleaning=True))
    if not enabled:
        stack.enter_context(_C.AutocastRegion(device_type, enabled=False))
    return stack


def _patch_compiled_code() -> None:
    """What AOTAutograd compiles switches autocast off for itself: NOTE [Compiled code in regions]."""

    def make_enter(original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(*args: Any, **kwargs: Any) -> Any:
            _C.enter_compiled_code()
            try:
                return original(*args, **kwargs)
            except BaseException:
                _C.leave_compiled_code()
                raise

        return enter

    def make_exit(original: Callable[..., Any]) -> Callable[..., Any]:
        def leave(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                _C.leave_compiled_code()

        return leave

    guard = torch._C._DisableAutocast
    while_marks_live.patch(guard, "__enter__", make_enter, "compiled code switches autocast off for itself")
    while_marks_live.patch(guard, "__exit__", make_exit, "compiled code switches autocast off for itself")


def _patch_random_state_of_compilation() -> None:
    """AOTAutograd keeps the tensors of its class `PhiloxState` when it has compiled, the last ones for good."""
    from torch._decomp.decompositions_for_rng import PhiloxState

    def make(original: Callable[[PhiloxState], None]) -> Callable[[PhiloxState], None]:
        def reset(self: PhiloxState) -> None:
            original(self)
            for tensor in (self.seed, self.base_offset):
                _C.unwrap_amp(tensor)  # they are made in the region in which code is compiled

        return reset

    while_marks_live.patch(PhiloxState, "reset", make, "keeps tensors of the region in which code was compiled last")


def _patch_export() -> None:
    """A program that is exported has other tensors in the place of those that it was traced with, without marks."""
    for name in ("_export", "_export_for_training"):
        while_marks_live.patch(sys.modules["torch.export._trace"], name, _refusing_amp, "exports without marks")


def _refusing_amp(original: Callable[..., Any]) -> Callable[..., Any]:
    def export(*args: Any, **kwargs: Any) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if any(_C.is_amp(tensor) for tensor in _tensors_of(leaf)):
                raise NotImplementedError(
                    f"torch.export was given AmpTensors, in a {type(leaf).__name__}: an exported program has none. "
                    "Call amp.unwrap(), and enter amp.autocast() in what is exported."
                )
        return original(*args, **kwargs)

    return export


def _tensors_of(leaf: object) -> Iterable[Tensor]:
    if isinstance(leaf, nn.Module):
        return chain(leaf.parameters(), leaf.buffers())
    return [leaf] if isinstance(leaf, Tensor) else []


when_imported("torch.export._trace", lambda: while_marks_live.declare(_patch_export))

while_marks_live.declare(
    _patch_torch_func,
    _patch_recurrent_modules,
    _patch_checkpoint,
    _patch_reentrant_checkpoint,
    _patch_compiled_code,
    _patch_random_state_of_compilation,
)
