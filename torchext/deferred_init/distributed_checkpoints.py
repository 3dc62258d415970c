"""`torch.distributed.checkpoint.save()` of deferred tensors: each is computed when it is written.

PyTorch's default planner returns the tensors one by one. Its file writer keeps all of them until the file is closed,
although only safetensors files need this. So the planner computes the tensors, and written tensors are freed.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .. import _C
from ..internals.held_tensors import shows_all
from ..internals.leases import while_fakes_live
from ..internals.patching import Function

__all__: list[str] = []

PLANNER = "torch.distributed.checkpoint.default_planner"

SLACK = 16 << 20
"""The freed memory that the process may keep, in bytes."""


class _Computed(threading.local):
    """The last tensor that a thread computed for writing."""

    storage: torch.UntypedStorage | None = None


_computed = _Computed()


@while_fakes_live.replaces(
    f"{PLANNER}:DefaultSavePlanner", "transform_object", reason="passes tensors to writers, which read them"
)
def _transform_object(original: Function, self: Any, write_item: Any, object: Any) -> Any:  # noqa: A002
    if isinstance(object, torch.Tensor) and _C.is_deferred(object):
        object = _C.evaluate(_own(object.detach()))  # noqa: A001
        if type(self).__module__ == PLANNER:  # other planners may keep their tensors
            _computed.storage = object.untyped_storage()
    return original(self, write_item, object)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its own storage and the same elements. The writer would clone a view."""
    return tensor if shows_all(tensor) else tensor.clone()


@while_fakes_live.replaces(
    "torch.distributed.checkpoint.filesystem", "_write_item", reason="keeps written tensors until the file ends"
)
def _write_item(original: Function, /, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    data, serialization = _argument(args, kwargs, 2, "data"), _argument(args, kwargs, 5, "serialization_format")
    computed, _computed.storage = _computed.storage, None
    is_written = getattr(serialization, "name", "TORCH_SAVE") == "TORCH_SAVE"
    if is_written and computed is not None and isinstance(data, torch.Tensor):
        storage = data.untyped_storage()
        if storage._cdata == computed._cdata:
            storage.resize_(0)
            _C.RecycledMemory(SLACK).trim()
    return result


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)
