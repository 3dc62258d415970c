"""AmpTensors: tensors whose operators autocast everywhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.optim import Optimizer

from .. import _C
from ..tools.held_tensors import reachable_tensors
from ..tools.leases import while_autocasting, while_marks_live
from ..tools.torch_release import DIFFERENCES

__all__ = ["AmpTensor", "is_amp", "unwrap", "wrap"]

T = TypeVar("T", bound=Tensor | nn.Module)
U = TypeVar("U", bound=Tensor | nn.Module | Optimizer)


class _AmpTensorMeta(torch._C._TensorMeta):
    def __instancecheck__(cls, instance: object) -> bool:  # noqa: N805 - ruff does not recognize PyTorch's metaclass
        return isinstance(instance, Tensor) and _C.is_amp(instance)


class AmpTensor(Tensor, metaclass=_AmpTensorMeta):
    """The tensors for which `is_amp()` is True, for `isinstance(x, AmpTensor)`.

    It has no direct instances: an AmpTensor keeps its class, because being an AmpTensor is a property of a tensor, like
    `requires_grad`. `wrap()` turns any tensor into one.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> AmpTensor:
        """Raise TypeError."""
        raise TypeError("AmpTensor cannot be instantiated: use torchext.amp.wrap(tensor).")


def wrap(obj: T) -> T:
    """Turn a tensor, or each parameter of a module, into an AmpTensor, in place.

    Every operator with an AmpTensor among its arguments autocasts to `torch.get_autocast_dtype(device_type)`, and its
    floating point and complex results are AmpTensors. So the whole forward pass of a wrapped module autocasts, without
    a region. Inside a region, also a disabled one, the region decides.

    Views, `detach()`, `copy.deepcopy()`, `state_dict()` and gradients of AmpTensors are AmpTensors. Unpickled tensors
    are not, and neither is an ordinary tensor that an AmpTensor is written into, in place or as `out=`. The operators
    of a backward pass do not autocast. Buffers are not wrapped: operators on them also get a parameter or one of its
    results. Neither is the state of optimizers; state that they create later for a wrapped parameter is an AmpTensor.

    Args:
        obj: A tensor, real, fake or deferred, or a module.

    Returns:
        `obj`.

    Raises:
        TypeError: `obj` is of another type, or a tensor that is neither floating point nor complex.
        RuntimeError: A tensor has metadata of a backend (`c10::BackendMeta`), where the mark is stored; nothing is
            wrapped then. Or another library uses the dispatch key of marked tensors.
    """
    if isinstance(obj, Tensor):
        _check_dtype(obj)
        _wrap([obj])
    elif isinstance(obj, nn.Module):
        _wrap(list(_castable_parameters(obj)))
        _wrap_when_initialized(obj)
    else:
        raise TypeError(f"wrap() takes a tensor or a module, but `obj` is a {type(obj).__name__}.")
    return obj


def _wrap(tensors: list[Tensor]) -> None:
    with while_marks_live.hold(), while_autocasting.hold():  # the marks keep holding it
        _C.wrap_amp(tensors)
    _forget_compiled_code()


def unwrap(obj: U) -> U:
    """Turn an AmpTensor, or each one that a module or an optimizer holds, into an ordinary tensor, in place.

    Gradients become ordinary with their tensors.

    Args:
        obj: A tensor, AmpTensor or not; a module (its parameters and buffers, and tensors in attributes, containers and
            other objects); or an optimizer (its parameters and its state).

    Returns:
        `obj`.

    Raises:
        TypeError: `obj` is of another type.
    """
    if not isinstance(obj, Tensor | nn.Module | Optimizer):
        raise TypeError(f"unwrap() takes a tensor, a module or an optimizer, but `obj` is a {type(obj).__name__}.")
    for tensor in [obj] if isinstance(obj, Tensor) else reachable_tensors(obj, _C.is_amp):
        _C.unwrap_amp(tensor)
        if tensor.is_leaf and tensor.grad is not None:
            _C.unwrap_amp(tensor.grad)
    if isinstance(obj, nn.Module):
        _forget_to_wrap(obj)
    _forget_compiled_code()
    return obj


def is_amp(tensor: Tensor) -> bool:
    """Return True if `tensor` is an AmpTensor: wrapped, computed from one, or created in a self-cleaning region.

    Raises:
        TypeError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"is_amp() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    return _C.is_amp(tensor)


def _forget_compiled_code() -> None:
    """Reset Dynamo before 2.12, which does not check again parameters that are still the same objects."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if DIFFERENCES["dynamo_keeps_parameters"].applies and dynamo is not None:
        dynamo.reset()


def _wrap_when_initialized(module: nn.Module) -> None:
    """Wrap the parameters of lazy modules when they are initialized.

    `UninitializedParameter.materialize()` replaces the data, and with it the mark.
    """
    _forget_to_wrap(module)
    for part in module.modules():
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
            part.register_forward_pre_hook(_wrap_initialized)


def _forget_to_wrap(module: nn.Module) -> None:
    for part in module.modules():
        _remove_hook(part)


def _remove_hook(module: nn.Module) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is _wrap_initialized]:
        del module._forward_pre_hooks[key]


def _wrap_initialized(module: nn.Module, args: Any) -> None:
    """Wrap the parameters, once. Runs after the hook of `LazyModuleMixin`, which was registered before."""
    _wrap(list(_castable_parameters(module, recurse=False)))
    _remove_hook(module)


def _check_dtype(tensor: Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"wrap() takes tensors of floating point and complex dtypes, but `obj` has the dtype {tensor.dtype}."
        )


def _castable_parameters(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    return (p for p in module.parameters(recurse) if p.is_floating_point() or p.is_complex())
