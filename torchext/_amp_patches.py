"""The few places where PyTorch's Python code has to know about AmpTensors.

Nothing is patched before the first of them is made. Every patch hands other tensors to the original, unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import eager_transforms
from torch.utils import checkpoint

from . import _C, _amp_backward, _marks_patches

__all__ = ["install"]

_installed = False
_lock = threading.Lock()


def install() -> None:
    """Installs the patches, once per process."""
    global _installed
    _amp_backward.install()
    _marks_patches.install()
    with _lock:
        if not _installed:
            _patch_torch_func()
            _patch_recurrent_modules()
            _patch_checkpoint()
            _installed = True


def _patch_torch_func() -> None:
    """`torch.func.grad` and its kin put their arguments in wrappers, which are to be what those are, and take them out.

    A wrapper takes over only the keys that PyTorch knows of. Without ours, operators would meet the identity below the
    transform, after autograd has recorded them in the dtype that they had.
    """
    for name in ("_wrap_for_grad", "_unwrap_for_grad"):
        setattr(eager_transforms, name, _keeping_identity(vars(eager_transforms)[name]))


def _keeping_identity(original: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    @wraps(original)
    def function(tensor: Tensor, level: int) -> Tensor:
        result = original(tensor, level)
        if result is not tensor:
            _C.make_amp_like(result, tensor)
        return result

    return function


def _patch_recurrent_modules() -> None:
    """RNN, LSTM and GRU want an input in the dtype of their weights, unless they are in a region of autocast."""
    original: Any = nn.RNNBase.check_input

    @wraps(original)
    def check_input(self: nn.RNNBase, tensor: Tensor, batch_sizes: Tensor | None) -> None:
        weight: Any = self._flat_weights[0]
        if _C.is_amp(tensor) or _C.is_amp(weight):
            tensor = torch.empty(tensor.shape, dtype=weight.dtype, device="meta")
        original(self, tensor, batch_sizes)

    nn.RNNBase.check_input = check_input  # type: ignore[assignment, method-assign]


def _patch_checkpoint() -> None:
    """What a backward pass computes again is to do as it did in the forward pass."""
    # Called by the other since 2.15.
    implementation = "_checkpoint_without_reentrant_generator_impl"
    name = implementation if hasattr(checkpoint, implementation) else "_checkpoint_without_reentrant_generator"
    original: Callable[..., Any] = getattr(checkpoint, name)

    @wraps(original)
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_recomputing(function), *args, **kwargs)

    setattr(checkpoint, name, generator)
    original_forward: Callable[..., Any] = checkpoint.CheckpointFunction.forward

    @wraps(original_forward)
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        outputs = original_forward(ctx, run_function, *args)
        ctx.run_function = _recomputing(run_function)
        return outputs

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]


def _recomputing(function: Callable[..., Any]) -> Callable[..., Any]:
    has_region_decided = _C.is_region_deciding()

    @wraps(function)
    def recompute(*args: Any, **kwargs: Any) -> Any:
        return _C.call_recomputing(has_region_decided, function, *args, **kwargs)

    return recompute
