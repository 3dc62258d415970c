"""`torch.distributed.checkpoint.save()` of deferred tensors: each is computed when its turn comes.

PyTorch's default planner is asked for the tensors one after the other, and its writer for files keeps all of them until
the file is closed, though only the format of safetensors needs that. So the planner computes what it is asked for, and
what has been written gives its memory back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .. import _C
from ..tools.imports import when_imported
from ..tools.leases import while_fakes_live
from .tensors import shows_all

__all__ = ["install"]

PLANNER = "torch.distributed.checkpoint.default_planner"
WRITER = "torch.distributed.checkpoint.filesystem"

SLACK = 16 << 20
"""How much memory that was freed the process may keep, in bytes."""


def install() -> None:
    """Declares the patches, as soon as there is something to patch."""
    if torch.distributed.is_available():
        when_imported(PLANNER, _patch_planner)
        when_imported(WRITER, _patch_writer)


while_fakes_live.declare(install)


def _patch_planner() -> None:
    import torch.distributed.checkpoint.default_planner as module

    while_fakes_live.patch(
        module.DefaultSavePlanner, "transform_object", _computing, "hands tensors to writers, which read them"
    )


def _patch_writer() -> None:
    import torch.distributed.checkpoint.filesystem as module

    while_fakes_live.patch(module, "_write_item", _then_letting_go, "keeps what has been written until the file ends")


class _Computed(threading.local):
    """What was computed last on a thread, only to be written."""

    storage: torch.UntypedStorage | None = None


_computed = _Computed()


def _computing(original: Callable[..., Any]) -> Callable[..., Any]:
    def transform_object(self: Any, write_item: Any, object: Any) -> Any:  # noqa: A002
        if isinstance(object, torch.Tensor) and _C.is_deferred(object):
            object = _C.evaluate(_own(object.detach()))  # noqa: A001
            if type(self).__module__ == PLANNER:  # others may keep what they get
                _computed.storage = object.untyped_storage()
        return original(self, write_item, object)

    return transform_object


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """What shows no more than the tensor, and is written alike: the writer clones views."""
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
