"""How operators are treated by autocast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from .. import _C

__all__ = ["policy", "register_policy"]

POLICIES = ("lower_precision", "float32", "promote", "fallthrough")
DEVICE_TYPES = ("cpu", "cuda")

Operator = str | OpOverload | OpOverloadPacket | CustomOpDef


def register_policy(op: Operator, policy: str, device_types: Iterable[str] = DEVICE_TYPES) -> None:
    """Lets an operator autocast: in a region its floating arguments are cast before it runs.

    For operators that `torch.library` or `TORCH_LIBRARY` have defined, for the rest of the process. Tensors on other
    devices and those in float64 are left as they are. Gradients flow through the casts.

    Args:
        op: The operator, as `torch.ops.mylib.op`, as what `torch.library.custom_op` returns, or by its name,
            "mylib::op". All overloads, unless one is given: `torch.ops.mylib.op.default`, "mylib::op.overload".
        policy: "lower_precision" casts to the dtype of the region, "float32" to that, and "promote" to the widest dtype
            among the arguments: bfloat16 and float16 have float32 in common. "fallthrough" states that nothing is cast.
        device_types: For tensors on which devices: "cpu", "cuda".

    Raises:
        TypeError: `op` is no operator, or `device_types` are no names.
        ValueError: There is no such operator, policy or device type, or the operator writes into an argument or returns
            a view of one, or has a policy already, from PyTorch, from `torch.library.register_autocast` or from here.
            Nothing is registered then.
    """
    if policy not in POLICIES:
        raise ValueError(f"There is no policy {policy!r}. Those that can be registered are {', '.join(POLICIES)}.")
    if not isinstance(device_types, Iterable):
        raise TypeError(f"`device_types` names devices, as ('cpu', 'cuda'), but it is a {type(device_types).__name__}.")
    types = list(dict.fromkeys([device_types] if isinstance(device_types, str) else device_types))
    for device_type in types:
        _check_device_type(device_type)
    _C.register_policy(_overloads(op), policy, types)


def policy(op: Operator, device_type: str) -> str:
    """Returns how an operator is treated in a region, by PyTorch or by `register_policy()`.

    PyTorch's kernel is asked, not a list: see [Probing autocast kernels] in csrc/amp/policy_probe.h.

    Args:
        op: The operator, as `register_policy()` takes it; its default overload, if it has one and none is given.
        device_type: For tensors on which devices: "cpu" or "cuda".

    Returns:
        "lower_precision", "float32", "promote" or "fallthrough", or "banned", if it raises an error. An operator that
        falls through may be made of others that do not.

    Raises:
        TypeError: `op` is no operator.
        ValueError: There is no such operator or device type, or overloads of the operator are treated differently.

    Example:
        >>> policy(torch.ops.aten.mm.default, "cpu")
        'lower_precision'
    """
    _check_device_type(device_type)
    found = {overload: _C.policy(name, overload, device_type) for name, overload in _overloads(op)}
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
    """The names of the operator and of its overloads."""
    if isinstance(op, CustomOpDef):
        op = op._opoverload
    if isinstance(op, OpOverload):
        return [(op._schema.name, op._schema.overload_name)]
    if isinstance(op, OpOverloadPacket):
        return [(op._qualified_op_name, "" if name == "default" else name) for name in op.overloads()]
    if not isinstance(op, str):
        raise TypeError(
            "Autocast knows operators, as torch.ops.aten.mm or by name, 'aten::mm', but `op` is a "
            f"{type(op).__name__}: {op!r}."
        )
    name, _, overload = op.partition(".")
    if overload or "::" not in name:
        return [(name, "" if overload == "default" else overload)]
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return [(name, schema.overload_name) for schema in schemas] or [(name, "")]
