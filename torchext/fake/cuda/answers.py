"""Functions that answer for fake CUDA devices, on the threads that have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ... import _C
from ...internals.leases import Lease
from ...internals.patching import Function

__all__ = ["answers", "while_devices_exist"]

while_devices_exist = Lease("a block of fake_mode(gpu=...) is open")


def answers(owner: Any, functions: Mapping[str, Function], *, reason: str, **options: Any) -> None:
    """Declare functions that are called on threads with fake devices, instead of those with the same names.

    Args:
        owner: The module or the class of the replaced functions.
        functions: The functions that answer, by the names of the replaced ones.
        reason: The PyTorch behavior that needs them.
        **options: Further arguments of `Lease.replaces()`.
    """
    for name, function in functions.items():
        while_devices_exist.replaces(owner, name, reason=reason, **options)(partial(_answer, function))


def _answer(answer: Function, original: Function, /, *args: Any, **kwargs: Any) -> Any:
    return (answer if _C.fake_cuda_devices() else original)(*args, **kwargs)
