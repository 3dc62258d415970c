"""The autocast policies of operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from .. import _C

__all__ = ["policy", "register_policy"]

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
