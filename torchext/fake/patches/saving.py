"""Patches for saving and rebuilding tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.serialization
from torch.nn import Module

from ... import _C
from ...internals.dispatch_keys import making_fakes
from ...internals.held_tensors import inner_tensors, is_wrapper
from ...internals.leases import while_fakes_live
from ...internals.patching import Function
from ..addresses import is_of_fakes
from ..cuda.functions import fake_cuda
from .storages import has_data, no_data

__all__: list[str] = []

# Data is often long lists of these.
NO_TENSORS = frozenset({int, float, complex, bool, str, bytes, type(None)})


@while_fakes_live.replaces(torch.serialization, "save", reason="leaves a broken file behind")
def _save(original: Function, /, obj: object, *args: Any, **kwargs: Any) -> Any:
    """`torch.save()` opens its file before the first tensor, and closes it properly if that raises."""
    fake = _find_fake(obj, set())
    if fake is not None:
        raise RuntimeError(no_data("torch.save()", fake))
    return original(obj, *args, **kwargs)


def _find_fake(obj: object, seen: set[int]) -> torch.Tensor | None:
    """Return a fake tensor in the containers and modules that make up `obj`. Other objects are not searched."""
    if isinstance(obj, torch.Tensor):
        if not is_wrapper(obj):
            return None if has_data(obj) else obj
        if id(obj) in seen:
            return None
        seen.add(id(obj))
        obj = inner_tensors(obj)
    if isinstance(obj, torch.UntypedStorage):
        return _find_fake(_C.bytes_of_storage(obj), seen) if _C.is_storage_of_fakes(obj) else None
    if not isinstance(obj, dict | list | tuple | set | frozenset | Module) or id(obj) in seen:
        return None
    seen.add(id(obj))
    content = vars(obj) if isinstance(obj, Module) else obj
    for part in content.values() if isinstance(content, dict) else content:
        if type(part) in NO_TENSORS:
            continue
        fake = _find_fake(part, seen)
        if fake is not None:
            return fake
    return None


@while_fakes_live.replaces(torch._utils, "_rebuild_tensor", reason="makes a real tensor on any storage")
def _rebuild_tensor(original: Function, storage: torch.TypedStorage, *args: Any) -> Any:
    """`copy.copy()` and unpickling put a new tensor on an existing storage. On a fake storage it has to be fake."""
    if not is_of_fakes(getattr(storage, "_untyped_storage", None)):
        return original(storage, *args)
    device = storage._untyped_storage.device
    with fake_cuda(device.index + 1 if device.type == "cuda" else 0), making_fakes():
        return original(storage, *args)
