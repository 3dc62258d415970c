"""`torch.distributed.checkpoint.save()` of deferred tensors: each is computed when it is written.

PyTorch's default planner returns the tensors one by one. Its file writer keeps all of them until the file is closed,
although only safetensors files need this. So the planner computes the tensors, and written tensors are freed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from ..internals.held_tensors import shows_all
from ..internals.imports import when_imported
from ..internals.leases import while_fakes_live

__all__ = ["install"]

PLANNER = "torch.distributed.checkpoint.default_planner"
WRITER = "torch.distributed.checkpoint.filesystem"

SLACK = 16 << 20
"""The freed memory that the process may keep, in bytes."""


def install() -> None:
    """Declare the patches when PyTorch's modules are imported."""
    if torch.distributed.is_available():
        when_imported(PLANNER, _patch_planner)
        when_imported(WRITER, _patch_writer)


while_fakes_live.declare(install)


def _patch_planner() -> None:
    import torch.distributed.checkpoint.default_planner as module

    while_fakes_live.patch(
        module.DefaultSavePlanner, "transform_object", _computing, "passes tensors to writers, which read them"
    )


def _patch_writer() -> None:
    import torch.distributed.checkpoint.filesystem as module

    while_fakes_live.patch(module, "_write_item", _then_letting_go, "keeps written tensors until the file ends")


class _Computed(threading.local):
    """The last tensor that a thread computed for writing."""

    storage: torch.UntypedStorage | None = None


_computed = _Computed()


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    def transform_object(self: Any, write_item: Any, object: Any) -> Any:  # noqa: A002
        if isinstance(object, torch.Tensor) and _C.is_deferred(object):
            object = _C.evaluate(_own(object.detach()))  # noqa: A001
            if type(self).__module__ == PLANNER:  # other planners may keep their tensors
                _computed.storage = object.untyped_storage()
        return original(self, write_item, object)

    return transform_object


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its own storage and the same elements. The writer would clone a view."""
    return tensor if shows_all(tensor) else tensor.clone()


def _then_letting_go(original: Callable[..., Any]) -> Callable[..., Any]:
    def _write_item(*args: Any, **kwargs: Any) -> Any:
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

    return _write_item


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return kwargs.get(name, args[place] if len(args) > place else None)
