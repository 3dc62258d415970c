"""Autocast: operators choose the precision in which they run, on PyTorch's own `Autocast*` keys and kernels.

There are four ways to use it: the context manager `autocast()`; the decorators `autocast`, `full_precision` and
`lower_precision`; AmpTensors, which `to_amp()` returns; and self-cleaning regions, `autocast(self_cleaning=True)`.
docs/how_to/autocast.md compares them. `register_policy()` makes operators of other libraries autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from .. import _C
from ..internals.arguments import renamed_names
from .amp_tensor import AmpTensor, is_amp, to_amp, to_normal
from .decorators import Autocasting, InFloat32, InLowerPrecision, decorate

__all__ = [
    "AmpTensor",
    "autocast",
    "full_precision",
    "is_amp",
    "lower_precision",
    "policy",
    "register_policy",
    "to_amp",
    "to_normal",
]

if not TYPE_CHECKING:
    __getattr__ = renamed_names(
        __name__, float="full_precision", half="lower_precision", wrap="to_amp", unwrap="to_normal"
    )


def __dir__() -> list[str]:
    return __all__


T = TypeVar("T", bound=Callable[..., Any])


class autocast(_C.AutocastRegion):  # noqa: N801 - a function to its users, as torch.autocast is
    """A region in which operators autocast: `with autocast(): ...`.

    It sets the same thread-local state as `torch.autocast`, so both report and respect each other's settings. Regions
    nest, including disabled regions in enabled ones and regions of different dtypes. One object can be entered any
    number of times, on any thread. When the last region of the thread ends, PyTorch drops the cached casts of weights.
    Enabling autocast for a device type that this machine lacks has no effect on tensors on other devices.

    Running `backward()` in an enabled region warns once for each source line.

    As a decorator, `@autocast` or `@autocast("cuda", dtype=...)`, it runs a function in such a region. If operators do
    not autocast for the device type outside of the call, the floating point tensors that the function returns, in any
    container that `torch.utils._pytree` handles, are cast to float32. Otherwise they are returned unchanged. Methods,
    generators, `async def` functions, modules and their classes, and classes of autograd functions can be decorated.
    The `backward` of an autograd function runs as its `forward` did.

    Args:
        device_type: The device type, as in `tensor.device.type`. Default: the accelerator in use (the fake one inside
            `fake_mode(gpu=...)`), or the CPU.
        dtype: The lower precision, `torch.bfloat16` or `torch.float16`. Default: the result of
            `torch.get_autocast_dtype(device_type)`. Other dtypes disable the region, with a warning, on all devices
            except CUDA.
        enabled: Whether operators autocast.
        cache_enabled: Whether the casts of weights are cached, so that each weight is cast once. Default: as outside of
            the region; True outside of all regions.
        self_cleaning: Whether the results of operators in the region are AmpTensors (`is_amp()`). The next operator
            that does not autocast casts them to float32: its results are ordinary tensors, and no operator gets a
            mixture of dtypes. Views of an AmpTensor are AmpTensors. So are tensors written in place, which keep their
            dtype.

    Raises:
        TypeError: An argument is of another type.
        ValueError: The device type does not exist.

    Example:
        >>> with autocast("cpu"):
        ...     torch.ones(2, 2) @ torch.ones(2, 2)
        tensor([[2., 2.],
                [2., 2.]], dtype=torch.bfloat16)
    """

    __slots__ = ()

    def __call__(self, function: T) -> T:
        """Decorate `function`."""
        return decorate(function, Autocasting(self))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _make_region, self._arguments()

    def __repr__(self) -> str:
        device_type, dtype, enabled, cache_enabled, self_cleaning = self._arguments()
        return f"autocast({device_type!r}, {dtype=}, {enabled=}, {cache_enabled=}, {self_cleaning=})"


def _make_region(
    device_type: Any, dtype: Any, enabled: bool, cache_enabled: bool | None, self_cleaning: bool
) -> autocast:
    return autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled, self_cleaning=self_cleaning)


def full_precision(function: T) -> T:
    """Run a function in full precision: without autocast, on float32, with float32 results. A decorator.

    The floating point tensors among the arguments and the results, in any container that `torch.utils._pytree` handles,
    are cast. float64 tensors and other objects are passed unchanged.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`). Parameters of modules are not arguments, and are not cast.

    Raises:
        TypeError: `function` is of another type.
    """
    return decorate(function, InFloat32())


def lower_precision(function: T) -> T:
    """Cast the floating point arguments of a function to the lower precision of the region around the call.

    Use it for kernels that do not autocast, because PyTorch's dispatcher does not call them. float64 arguments are not
    cast, and neither are arguments on devices for which operators do not autocast.

    Args:
        function: A function of any kind, a module or a class of modules (its `forward`), or a class of autograd
            functions (its `forward` and `backward`).

    Raises:
        TypeError: `function` is of another type.
    """
    return decorate(function, InLowerPrecision())


# ---- The autocast policies of operators


# In the order of `CastPolicy` of csrc/extensions/amp/policies.h.
POLICIES = ("lower_precision", "float32", "promote", "fallthrough")
DEVICE_TYPES = ("cpu", "cuda")

Operator = str | OpOverload | OpOverloadPacket | CustomOpDef


def register_policy(op: Operator, policy: str, device_types: Iterable[str] = DEVICE_TYPES) -> None:
    """Register an operator for autocast: in a region its floating point arguments are cast before it runs.

    For operators that `torch.library` or `TORCH_LIBRARY` define, until the process ends. float64 tensors, and tensors
    on other devices, are not cast. Gradients flow through the casts.

    Args:
        op: The operator, as `torch.ops.mylib.op`, the result of `torch.library.custom_op`, or its name, "mylib::op".
            All overloads, unless one is given: `torch.ops.mylib.op.default`, "mylib::op.overload".
        policy: "lower_precision" casts to the dtype of the region; "float32" casts to float32; "promote" casts to the
            widest dtype among the arguments (float32 for bfloat16 and float16); "fallthrough" casts nothing.
        device_types: The device types of the tensors: "cpu", "cuda".

    Raises:
        TypeError: `op` is not an operator, or `device_types` are not names.
        ValueError: The operator, policy or device type does not exist; or the operator writes into an argument or
            returns a view of one; or it has a policy already, from PyTorch, `torch.library.register_autocast` or this
            function. Nothing is registered then.
    """
    if policy not in POLICIES:
        raise ValueError(f"There is no policy {policy!r}. Choose one of {', '.join(POLICIES)}.")
    if not isinstance(device_types, Iterable):
        raise TypeError(f"`device_types` names devices, as ('cpu', 'cuda'), but it is a {type(device_types).__name__}.")
    types = list(dict.fromkeys([device_types] if isinstance(device_types, str) else device_types))
    for device_type in types:
        _check_device_type(device_type)
    _C.register_policy(_overloads(op), POLICIES.index(policy), list(map(torch.device, types)))


def policy(op: Operator, device_type: str) -> str:
    """Return the autocast policy of an operator, from PyTorch or from `register_policy()`.

    The policy is measured by calling PyTorch's kernel, not read from a list: csrc/extensions/amp/policies.h.

    Args:
        op: The operator, as for `register_policy()`. Without an overload, its default overload if it has one.
        device_type: The device type of the tensors: "cpu" or "cuda".

    Returns:
        "lower_precision", "float32", "promote", "fallthrough", or "banned" if the operator raises an error. An operator
        that falls through may call others that do not.

    Raises:
        TypeError: `op` is not an operator.
        ValueError: The operator or the device type does not exist, or its overloads have different policies.

    Example:
        >>> policy(torch.ops.aten.mm.default, "cpu")
        'lower_precision'
    """
    _check_device_type(device_type)
    numbers = {overload: _C.policy(name, overload, torch.device(device_type)) for name, overload in _overloads(op)}
    found = {overload: (*POLICIES, "banned")[number] for overload, number in numbers.items()}
    if "" in found:
        return found[""]
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{overload or 'default'}: {found[overload]}" for overload in found)
        raise ValueError(f"The overloads of {op} are treated differently on {device_type!r}: {listed}. Name one.")
    return next(iter(found.values()))


def _check_device_type(device_type: Any) -> None:
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"Policies are for the device types {DEVICE_TYPES}, but {device_type!r} was given.")


def _overloads(op: Any) -> list[tuple[str, str]]:
    """Return the name of the operator with each of its overloads."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return [(op._schema.name, op._schema.overload_name)]
    if isinstance(op, OpOverloadPacket):
        return [(op._qualified_op_name, "" if name == "default" else name) for name in op.overloads()]
    if not isinstance(op, str):
        raise TypeError(
            "`op`: expected an operator, such as torch.ops.aten.mm, or a name, such as 'aten::mm', got "
            f"{type(op).__name__}: {op!r}."
        )
    name, _, overload = op.partition(".")
    if overload or "::" not in name:
        return [(name, "" if overload == "default" else overload)]
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return [(name, schema.overload_name) for schema in schemas] or [(name, "")]
