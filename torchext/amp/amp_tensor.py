"""AmpTensors: tensors whose operators autocast, wherever they are used."""

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
    def __instancecheck__(cls, instance: object) -> bool:  # noqa: N805 - ruff knows no metaclass of PyTorch's
        return isinstance(instance, Tensor) and _C.is_amp(instance)


class AmpTensor(Tensor, metaclass=_AmpTensorMeta):
    """The class of tensors for which `is_amp()` is true: `isinstance(x, AmpTensor)`.

    It has no instances of its own: an AmpTensor keeps its class, because to be one is something that a tensor has, as
    `requires_grad` is. `wrap()` makes one of any tensor.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> AmpTensor:
        """Refuses: there are no instances."""
        raise TypeError("AmpTensor cannot be instantiated: use torchext.amp.wrap(tensor).")


def wrap(obj: T) -> T:
    """Makes an AmpTensor of a tensor, or of each parameter of a module, in place.

    Every operator that has an AmpTensor among its arguments autocasts, to the dtype of
    `torch.get_autocast_dtype(device_type)`, and its floating and complex results are AmpTensors. So wrapping a module
    makes its whole forward pass autocast, with no region. Inside of regions these decide, disabled ones too.

    Views, `detach()`, `copy.deepcopy()`, `state_dict()` and gradients of AmpTensors are AmpTensors as well; what is
    pickled is not, and neither is an ordinary tensor that an AmpTensor is written into, in place or as `out=`. The
    operators of a backward pass do not autocast. Buffers are left as they are: operators on them meet a parameter or
    the results of one. So is the state of optimizers: what they make for a wrapped parameter is an AmpTensor.

    Args:
        obj: A tensor, real, fake or deferred, or a module.

    Returns:
        `obj` itself.

    Raises:
        TypeError: `obj` is something else, or a tensor that is neither floating nor complex.
        RuntimeError: A tensor has metadata of a backend's (`c10::BackendMeta`), in whose place it would be marked; then
            nothing is wrapped. Or another library has taken the dispatch key of marked tensors.
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
    with while_marks_live.hold(), while_autocasting.hold():  # goes on being held by the marks
        _C.wrap_amp(tensors)
    _forget_compiled_code()


def unwrap(obj: U) -> U:
    """Makes an ordinary tensor of an AmpTensor, or of each that a module or an optimizer holds, in place.

    Gradients become ordinary along with their tensors.

    Args:
        obj: A tensor, whether it is an AmpTensor or not, or a module: its parameters and buffers, and what it holds in
            attributes, containers and other objects. Or an optimizer: its parameters and its state.

    Returns:
        `obj` itself.

    Raises:
        TypeError: `obj` is something else.
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
    """Returns true if `tensor` is an AmpTensor: wrapped, computed from such, or made inside a self-cleaning region.

    Raises:
        TypeError: `tensor` is not a tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"is_amp() takes a tensor, but `tensor` is a {type(tensor).__name__}.")
    return _C.is_amp(tensor)


def _forget_compiled_code() -> None:
    """Before 2.12 Dynamo does not look again at the parameters of a module in which none is another object."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if DIFFERENCES["dynamo_keeps_parameters"].applies and dynamo is not None:
        dynamo.reset()


def _wrap_when_initialized(module: nn.Module) -> None:
    """Lets lazy modules wrap their parameters when they get them.

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
    """Runs once, after the hook of `LazyModuleMixin`, which was there before."""
    _wrap(list(_castable_parameters(module, recurse=False)))
    _remove_hook(module)


def _check_dtype(tensor: Tensor) -> None:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(
            f"wrap() takes tensors of floating and complex dtypes, which autocast has to do with, but `obj` is of "
            f"{tensor.dtype}."
        )


def _castable_parameters(module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    return (p for p in module.parameters(recurse) if p.is_floating_point() or p.is_complex())
